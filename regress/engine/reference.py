"""Reference policy of the KL term: a frozen copy, or none when no term uses it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.batch import Microbatch
from regress.engine.config.schema import ReferenceConfig
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.world import SingleProcess, World


class Reference:
    """A frozen model: the one given, or a copy of the policy at construction.

    Every ``sync_every_n_steps`` steps it moves towards the policy,
    ``pi_ref = alpha * pi + (1 - alpha) * pi_ref`` (TRL's ``sync_ref_model``).
    """

    def __init__(
        self,
        policy: LocalPolicy,
        config: ReferenceConfig,
        model: PreTrainedModel | None = None,
        world: World | None = None,
    ) -> None:
        self._source = policy
        self._config = config
        frozen = copy.deepcopy(policy.whole_model()) if model is None else model
        self._policy = (world or SingleProcess()).policy(
            frozen.requires_grad_(False),
            temperature=policy.temperature,
            compile=policy.compile,
            log_prob_chunk_size=policy.log_prob_chunk_size,
        )

    @property
    def model(self) -> PreTrainedModel:
        """Frozen model, or the part of it that lies on this rank."""
        return self._policy.model

    @property
    def policy(self) -> LocalPolicy:
        """Frozen model as a policy over all ranks."""
        return self._policy

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        return self._policy.log_probs(microbatches)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Synchronize if this step (counted from 0) ends an interval."""
        interval = self._config.sync_every_n_steps
        if interval is None or (step + 1) % interval:
            return
        source = dict(self._source.named_parameters())
        for name, ours in self._policy.named_parameters():  # both hold the same part on this rank
            local(ours).lerp_(local(source[name]), self._config.mixup_alpha)
