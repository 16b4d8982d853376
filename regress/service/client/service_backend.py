"""Model in a training service, as the remote trainer sees it: blocking calls that no wire shows through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from regress.service.service_api import AdamParams, Array, Datum, PassResult, SamplingRequest, SamplingResult

LossConfig = Mapping[str, float | str | bool]


@dataclass(frozen=True)
class Opened:
    """Model that was created in a service.

    Attributes:
        model_id: its id there.
        base_model: name of the model that it began as.
        tokenizer: folder or name of its tokenizer; None where the service does not tell.
    """

    model_id: str
    base_model: str
    tokenizer: str | None


class RemoteSampler(Protocol):
    """Sampler of saved weights."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Return the completions of each request; the service works on all of them at once."""

    def prompt_logprobs(self, prompts: Sequence[Array]) -> list[Array]:
        """Return the ``[P]`` log-probs of each prompt's tokens, NaN first."""


class RemoteModel(Protocol):
    """Model that a service trains.

    Every method waits for the service, and raises `ServiceError` in one sentence for whatever it refuses or cannot do.

    Attributes:
        wire: protocol that it is reached by.
        opened: what the service stated about it.
    """

    @property
    def wire(self) -> str: ...

    @property
    def opened(self) -> Opened: ...

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given, ``[T]`` a datum."""

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""

    def sampler(self, path: str | None) -> RemoteSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights, perhaps with the state of the optimizer, and return the path of the save."""

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""

    def close(self) -> None:
        """End the session with the service; nothing that was saved is lost."""
