"""Reference policy of the KL term: a frozen copy, or none when no term uses it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.engine.adapters.adapter_parameters import has_adapter, trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.model_config import ReferenceConfig
from regress.engine.engine_ranks import SingleProcess, World
from regress.engine.local_tensor import local
from regress.engine.mini_batch import Microbatch


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
            pieces=policy.pieces,
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the reference has of its own on this rank, by name: all parameters, or an adapter."""
        return self._policy.named_parameters() if self._adapter is None else iter(self._adapter.items())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what the reference has of its own, by name, as they are without a split."""
        return {name: tuple(p.shape) for name, p in self._named(self._policy.architecture)}

    def whole(self) -> dict[str, Tensor]:
        """Return copies of what the reference has of its own, whole; all ranks call this together."""
        with self._in_place():
            return {name: p.detach().clone() for name, p in self._named(self._policy.whole_model())}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put whole weights into the reference: on each rank its part."""
        for name, ours in self.parameters():
            local(ours).copy_(local(self._policy.part(name, weights[name].to(ours.device, ours.dtype))))

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        with self._in_place():
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

    def _named(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
        return model.named_parameters() if self._adapter is None else trained_parameters(model)

    def _in_place(self) -> AbstractContextManager[None]:
        """Return the context in which the model that computes is the reference."""
        if self._adapter is None:
            return nullcontext()
        return _exchanged(dict(self._policy.named_parameters()), self._adapter)


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
    before = {name: local(parameters[name]).detach().clone() for name in values}
    for name, value in values.items():
        local(parameters[name]).copy_(value)
    try:
        yield
    finally:
        for name, value in before.items():
            local(parameters[name]).copy_(value)
