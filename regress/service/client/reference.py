"""Reference of the KL term that a service holds: the policy before the first update, or its base model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.service.api import Array, as_int64
from regress.service.client.backend import RemoteSampler
from regress.service.client.datums import loss_token_values, rows_of


class Reference(Protocol):
    """Interface that a trainer needs of the reference."""

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""

    def after_step(self, step: int) -> None:
        """Follow the policy, if it is to."""


class LocalReference:
    """Frozen model in this process."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each, in float32."""
        return [values.float() for values in self._policy.log_probs(microbatches)]

    def after_step(self, step: int) -> None:
        """Do nothing: it is never synchronized."""


class ServiceReference:
    """Frozen model in a service, asked for the log-probs of whole sequences.

    Args:
        sampler: returns the sampler of its weights.
    """

    def __init__(self, sampler: Callable[[], RemoteSampler]) -> None:
        self._sampler = sampler

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        prompts = [prompt for micro in microbatches for prompt in _sequences(micro)]
        found = iter(self._sampler().prompt_logprobs(prompts))
        return [
            loss_token_values(micro, [next(found)[1:] for _ in rows_of(micro)], torch.float32)
            for micro in microbatches
        ]

    def after_step(self, step: int) -> None:
        """Do nothing: it is never synchronized."""


def _sequences(micro: Microbatch) -> list[Array]:
    ids = micro.input_ids.cpu().numpy()
    return [as_int64(ids[place.row, place.column : place.column + place.length]) for place in rows_of(micro)]
