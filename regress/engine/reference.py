"""Reference policy of the KL term: a frozen copy, or none when no term uses it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.engine.adapters.parameters import has_adapter
from regress.engine.batch import Microbatch
from regress.engine.config.schema import ReferenceConfig
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.world import SingleProcess, World


class Reference:
    """A frozen model: the one given, or a copy of the policy at construction.

    Of a policy with an adapter only the adapter is copied: it takes the place of the policy's own while
    log-probs are computed, and the base model is in memory once.

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
        self._adapter: dict[str, Tensor] | None = None
        if model is None and has_adapter(policy.model):
            self._adapter = _base(policy) if config.without_adapter else _copied(policy)
            self._policy = policy
            return
        frozen = copy.deepcopy(policy.whole_model()) if model is None else model
        self._policy = (world or SingleProcess()).policy(
            frozen.requires_grad_(False),
            temperature=policy.temperature,
            compile=policy.compile,
            log_prob_chunk_size=policy.log_prob_chunk_size,
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what makes the reference another model than the policy's base, by name: all parameters on this
        rank, or its adapter.
        """
        return self._policy.named_parameters() if self._adapter is None else iter(self._adapter.items())

    @property
    def policy(self) -> LocalPolicy:
        """Frozen model as a policy over all ranks."""
        return self._policy

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        if self._adapter is None:
            return self._policy.log_probs(microbatches)
        with _exchanged(dict(self._policy.named_parameters()), self._adapter):
            return self._policy.log_probs(microbatches)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Synchronize if this step (counted from 0) ends an interval."""
        interval = self._config.sync_every_n_steps
        if interval is None or (step + 1) % interval:
            return
        source = dict(self._source.named_parameters())
        for name, ours in self.parameters():  # both hold the same part on this rank
            local(ours).lerp_(local(source[name]), self._config.mixup_alpha)


def _copied(policy: LocalPolicy) -> dict[str, Tensor]:
    """Return a copy of this rank's part of the adapter."""
    return {name: local(parameter).detach().clone() for name, parameter in policy.named_parameters()}


def _base(policy: LocalPolicy) -> dict[str, Tensor]:
    """Return this rank's part of an adapter that changes nothing."""
    return {name: torch.zeros_like(value) for name, value in _copied(policy).items()}


@contextmanager
@torch.no_grad()
def _exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values inside the context, in their own memory, and the same bits as before after it."""
    before = {name: local(parameter).detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        local(parameter).copy_(values[name])
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            local(parameter).copy_(before[name])
