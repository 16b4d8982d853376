"""Model of a service in this very process: the calls of a client without a wire between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regress.service.client.microbatch_datums import taken, with_array
from regress.service.client.service_backend import LossConfig, Opened
from regress.service.service_api import (
    AdamParams,
    Array,
    Datum,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    Operation,
    PassRequest,
    PassResult,
    SamplingRequest,
    SamplingResult,
    SaveKind,
    Service,
    ServiceError,
    Status,
)

WAIT = 10.0


class LocalModel:
    """Model in a `Service` of this process.

    Args:
        lora: adapter that is trained; None: all parameters.
        wire: protocol whose ways it takes, as the settings of a loss depend on it.
    """

    def __init__(
        self, service: Service, base_model: str, lora: LoraSpec | None = None, *, wire: str = "weaver"
    ) -> None:
        self.wire = wire
        self._service = service
        self._session = service.create_session({"owner": "local"})
        info: ModelInfo = self._result(service.create_model(self._session, 0, ModelSpec(base_model, lora)))
        self.opened = Opened(info.model_id, info.base_model, info.tokenizer)
        self._samplers = 0
        self._sequence = 0

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""
        return self._pass(PassRequest(data, "forward_logprob", forward_only=True))

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""
        return self._pass(PassRequest(taken(data, loss, config), loss, dict(config)))

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given, ``[T]`` a datum."""
        weighted = with_array(data, "surrogate_weights", gradients)
        return self._pass(PassRequest(taken(weighted, "surrogate", config), "surrogate", dict(config)))

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""
        found = self._result(self._service.optim_step(self.opened.model_id, self._next(), params))
        return dict(found.metrics)

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""
        return self._saved(name, SaveKind.SAMPLER)

    def sampler(self, path: str | None) -> LocalSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""
        self._samplers += 1
        base = self.opened.base_model if path is None else None
        found = self._service.create_sampler(self._session, self._samplers, path=path, base_model=base)
        return LocalSampler(self._service, found)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights, perhaps with the state of the optimizer, and return the path of the save."""
        return self._saved(name, SaveKind.STATE if optimizer else SaveKind.WEIGHTS)

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""
        self._result(self._service.load(self.opened.model_id, self._next(), path, optimizer=True))

    def close(self) -> None:
        """End the session with the service."""
        self._service.finish_session(self._session)

    def _saved(self, name: str, kind: SaveKind) -> str:
        path: str = self._result(self._service.save(self.opened.model_id, self._next(), name, kind)).path
        return path

    def _pass(self, request: PassRequest) -> PassResult:
        found: PassResult = self._result(self._service.run_pass(self.opened.model_id, self._next(), request))
        return found

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _result(self, operation: Operation) -> Any:
        return result_of(self._service, operation)


class LocalSampler:
    """Sampler in a `Service` of this process."""

    def __init__(self, service: Service, id: str) -> None:
        self._service = service
        self._id = id

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Return the completions of each request."""
        made = [self._service.sample(self._id, request) for request in requests]
        return [result_of(self._service, operation) for operation in made]

    def prompt_logprobs(self, prompts: Sequence[Array]) -> list[Array]:
        """Return the ``[P]`` log-probs of each prompt's tokens, NaN first."""
        made = [self._service.prompt_logprobs(self._id, prompt) for prompt in prompts]
        return [result_of(self._service, operation) for operation in made]


def result_of(service: Service, operation: Operation) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        ServiceError: if it failed.
    """
    while operation.status not in (Status.DONE, Status.FAILED):
        operation = service.operation(operation.id, timeout=WAIT)
    if operation.status is Status.FAILED:
        raise operation.error or ServiceError("the service gave no reason", category="server")
    return operation.result
