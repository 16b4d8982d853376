"""Requests and results of the training service, in a form that belongs to no wire protocol.

A wire translates requests into these values, calls the `Service`, and translates the results of its operations back.
Numbers are numpy arrays; everything here is free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from regress.errors import RegressError

Array = NDArray[Any]
Json = Mapping[str, Any]
Category = Literal["user", "server"]


SAVE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
"""Names of saves, which can be those of folders anywhere."""


class ServiceError(RegressError):
    """A request that the service refuses, or an operation that failed.

    Attributes:
        code: short name for programs, such as ``not_found``, ``invalid_request``, ``rank_failed``.
        category: ``user`` if another request helps, ``server`` if the service is at fault.
        retryable: True if the same request may succeed later.
    """

    exit_code = 2  # of a command that cannot serve

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        category: Category = "user",
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.category: Category = category
        self.retryable = retryable


@dataclass(frozen=True)
class LoraSpec:
    """Adapter of a model; a rank of 0 on a wire without full parameters means full parameters, hence no `LoraSpec`."""

    rank: int
    seed: int | None = None
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """Model to create: the name of one that the service offers, and how it is trained (``lora`` None: in full)."""

    base_model: str
    lora: LoraSpec | None = None
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Datum:
    """One sequence of a training request.

    Attributes:
        tokens: ``[T]`` int64, input of the model.
        inputs: arrays of the loss by name, ``[T]`` each: ``target_tokens`` (int64; ``-100`` is left out of the
            loss; ``[T, N]`` if a position has N targets, each with a loss of its own, for losses without a ratio)
            and in the same shape, as the loss needs them, ``logprobs``, ``advantages``, ``weights``, ``loss_mask``,
            ``surrogate_weights``.
        id: the client's own name of the datum.
    """

    tokens: Array
    inputs: Mapping[str, Array]
    id: str | None = None


@dataclass(frozen=True)
class PassRequest:
    """Forward pass over some datums, with a backward pass unless ``forward_only``.

    Attributes:
        loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro``, ``surrogate`` or
            ``forward_logprob`` (log-probs alone).
        config: settings of the loss, such as ``clip_low_threshold``; ``enable_debug_dump`` asks for a dump.
    """

    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str | bool] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class PassResult:
    """Result of a pass.

    Attributes:
        outputs: for each datum float arrays in the shape of its targets by name: ``logprobs``, and with a loss
            ``elementwise_loss``.
        metrics: sums and extremes over all datums by ``name:reduction``: ``loss:sum``, ``tokens:sum``, ``weight:sum``,
            and for ratio losses ``ratio:max``, ``clip:sum``, ``logprob_diff_abs:max``, ``logprob_diff_abs:sum``.
    """

    outputs: Sequence[Mapping[str, Array]]
    metrics: Mapping[str, float]
    datum_ids: Sequence[str | None] = ()


@dataclass(frozen=True)
class AdamParams:
    """AdamW settings of one optimizer step; ``grad_clip_norm`` of 0 leaves the gradient. Defaults are the wires'."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class OptimResult:
    """Result of an optimizer step: gradient norm before and after clipping, and the settings that were in effect."""

    step: int
    grad_norm: float
    clipped_grad_norm: float
    params: AdamParams

    @property
    def metrics(self) -> dict[str, float]:
        """Return all of it as named numbers."""
        shown = {name: float(value) for name, value in vars(self.params).items()}
        return {
            "grad_norm": self.grad_norm,
            "clipped_grad_norm": self.clipped_grad_norm,
            "step": float(self.step),
            **shown,
        }


class SaveKind(Enum):
    """Contents of a save."""

    WEIGHTS = "weights"
    STATE = "state"
    """Weights and optimizer."""
    SAMPLER = "sampler"


@dataclass(frozen=True)
class Saved:
    """Complete save: its name, path (``<model_id>/<kind>/<name>``, to which a wire adds its scheme) and step."""

    model_id: str
    kind: SaveKind
    name: str
    path: str
    step: int


@dataclass(frozen=True)
class SamplingRow:
    """Further prompt of a sampling request, of which one completion is drawn."""

    prompt: Array
    seed: int
    max_tokens: int | None = None


@dataclass(frozen=True)
class SamplingRequest:
    """Completions of one prompt, or of several that are sampled as one batch.

    Attributes:
        prompt: ``[P]`` int64 token ids.
        count: number of completions.
        stop: token ids or texts at which a completion ends, beside the tokenizer's end token.
        seed: with the index of the completion it determines every draw; None: a seed of the service's own, which the
            result names.
    """

    prompt: Array
    count: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    prompt_logprobs: bool = False
    rows: Sequence[SamplingRow] = ()

    @property
    def prompts(self) -> list[Array]:
        """Prompts of the batch."""
        return [self.prompt, *(row.prompt for row in self.rows)]


@dataclass(frozen=True)
class SampledSequence:
    """One completion: token ids ``[C]``, their log-probs ``[C]``, text, and ``stop`` or ``length``."""

    tokens: Array
    logprobs: Array
    text: str
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingResult:
    """Completions, those of the rows last.

    Attributes:
        prompt_logprobs: ``[P]`` with NaN first; those of several prompts one after the other.
        step: optimizer steps of the weights in use.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Array | None
    step: int
    seed: int


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a created model; ``tokenizer`` is a folder that `AutoTokenizer` loads."""

    model_id: str
    base_model: str
    tokenizer: str
    architecture: str
    lora: LoraSpec | None
    step: int
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OfferedModel:
    """Base model that clients may create."""

    name: str
    tokenizer: str
    max_context_length: int


@dataclass(frozen=True)
class SamplerInfo:
    """Facts about a sampler; ``path`` is that of its `Saved` weights, None for those of the base model."""

    sampler_id: str
    base_model: str
    path: str | None
    tokenizer: str


class Status(Enum):
    """State of an operation; the last two are final."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Operation:
    """State of an operation at one moment; ``result`` when done, ``error`` when failed."""

    id: str
    status: Status
    model_id: str | None = None
    result: Any = None
    error: ServiceError | None = None


class Service(Protocol):
    """The training service. Its methods return at once and may be called from any thread.

    Whatever a caller can mend raises `ServiceError` before a sequence number is spent; once an `Operation` is returned,
    a mistake in its content makes that operation fail. ``seq_id`` orders the requests of a model: they run as 1, 2, 3,
    ..., whatever order they arrive in; None: after everything that has been accepted so far. A request with a
    ``seq_id`` that was seen before is the operation of the first one, which is never executed twice; if its content
    differs, the returned operation has failed.
    """

    def models_offered(self) -> Sequence[OfferedModel]: ...
    def create_session(self, metadata: Json, key: str | None = None) -> str:
        """Return the id of a new session, without ``:`` and ``/``; ``metadata`` is kept with it over a restart.

        With a ``key`` that was seen before it is the session of then, unless that one is finished.
        """

    def session_metadata(self, session_id: str) -> Json:
        """Return what the session was created with; its ``owner`` names the API key that its models belong to."""

    def touch_session(self, session_id: str) -> None: ...
    def finish_session(self, session_id: str) -> None: ...
    def create_model(self, session_id: str, number: int, spec: ModelSpec) -> Operation:
        """Create the model ``<session_id>:train:<number>``; the result is a `ModelInfo`."""

    def create_model_from(self, session_id: str, number: int, path: str, *, optimizer: bool) -> Operation:
        """Create a model of what was saved at a path; the result is a `ModelInfo`."""

    def model_info(self, model_id: str) -> ModelInfo: ...
    def close_model(self, model_id: str) -> None: ...
    def run_pass(self, model_id: str, seq_id: int | None, request: PassRequest) -> Operation:
        """Queue a pass (`PassResult`); without ``forward_only`` gradients are added to those since the last step."""

    def optim_step(self, model_id: str, seq_id: int | None, params: AdamParams) -> Operation:
        """Queue an update (`OptimResult`)."""

    def save(
        self, model_id: str, seq_id: int | None, name: str | None, kind: SaveKind, *, overwrite: bool = False
    ) -> Operation:
        """Queue a save (`Saved`); with gradients since the last step, all but a save for samplers is refused."""

    def load(self, model_id: str, seq_id: int | None, path: str, *, optimizer: bool) -> Operation:
        """Queue the loading of a save (`Saved`)."""

    def saves(self, model_id: str) -> Sequence[Saved]: ...
    def fail(self, model_id: str, seq_id: int, error: ServiceError) -> Operation:
        """Spend a sequence number on a request whose content could not be read; the operation has failed."""

    def create_sampler(
        self, session_id: str, number: int, *, path: str | None, base_model: str | None
    ) -> str:
        """Return ``<session_id>:sample:<number>``, sampler of saved weights or of a base model; again: the same one."""

    def sampler_info(self, sampler_id: str) -> SamplerInfo: ...
    def sample(self, sampler_id: str, request: SamplingRequest, number: int | None = None) -> Operation:
        """Queue sampling (`SamplingResult`). A ``number`` of the sampler orders nothing: with one that was seen before
        it is the operation of then, and if the content differs the returned operation has failed.
        """

    def prompt_logprobs(self, sampler_id: str, *prompts: Array) -> Operation:
        """Queue prompts for ``[P]`` log-probs, NaN first; those of several prompts one after the other."""

    def operation(self, operation_id: str, *, timeout: float = 0.0) -> Operation:
        """Return the state of an operation, after at most ``timeout`` seconds of waiting for a final one."""

    def cancel(self, operation_id: str) -> Operation:
        """Cancel an operation that does not run yet: it has failed, and its sequence number is spent."""

    def health(self) -> Json: ...
    def metrics(self) -> Mapping[str, float]: ...


class Host(Protocol):
    """The engine's side: models and their steps, in the order of the calls. All ranks make the same calls.

    It knows no sessions, sequence numbers or queues. Every method may raise `ServiceError`; the models are then
    unchanged. ``where`` names the request in dumps (model, operation, ``seq_id``).
    """

    def offered(self) -> Sequence[OfferedModel]:
        """Return the base models that clients may create."""

    def create(self, model_id: str, spec: ModelSpec) -> ModelInfo: ...
    def create_from(self, model_id: str, saved: str, *, optimizer: bool) -> ModelInfo: ...
    def close(self, model_id: str) -> None: ...
    def run_pass(self, model_id: str, request: PassRequest, where: Json) -> PassResult: ...
    def optim_step(self, model_id: str, params: AdamParams, where: Json) -> OptimResult: ...
    def save(self, model_id: str, folder: str, kind: SaveKind) -> int:
        """Write what a save keeps into a folder that does not exist yet; returns the model's step."""

    def load(self, model_id: str, folder: str, *, optimizer: bool) -> int: ...
    def pending_gradients(self, model_id: str) -> int:
        """Return the number of passes whose gradients no step has used."""

    def open_sampler(self, sampler_id: str, folder: str | None, base_model: str | None) -> None: ...
    def close_sampler(self, sampler_id: str) -> None: ...
    def sample(self, sampler_id: str, request: SamplingRequest) -> SamplingResult: ...
    def prompt_logprobs(self, sampler_id: str, *prompts: Array) -> Array: ...
    def fingerprint(self) -> Json:
        """Return versions, threads, dtype, device and determinism settings."""


def as_int64(values: Sequence[int] | Array) -> Array:
    """Return token ids as ``[T]`` int64."""
    return np.asarray(values, dtype=np.int64)
