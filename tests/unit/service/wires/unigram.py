"""A `Service` in memory, whose models are one logit for each token: small, ordered, and with gradients that count."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regress.service.service_api import (
    AdamParams,
    Array,
    Json,
    ModelInfo,
    ModelSpec,
    OfferedModel,
    Operation,
    OptimResult,
    PassRequest,
    PassResult,
    SampledSequence,
    SamplerInfo,
    SamplingRequest,
    SamplingResult,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)

VOCABULARY = 16
LOSSES = ("cross_entropy", "importance_sampling", "surrogate", "forward_logprob")


@dataclass
class Model:
    """Logits, their gradient, and the requests that wait for an earlier number."""

    info: ModelInfo
    logits: Array = field(default_factory=lambda: np.zeros(VOCABULARY))
    gradient: Array = field(default_factory=lambda: np.zeros(VOCABULARY))
    passes: int = 0
    step: int = 0
    next: int = 1
    waiting: dict[int, tuple[str, Callable[[], Any]]] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)


class Unigrams:
    """the service; everything runs in the calling thread as soon as its number is the next one."""

    def __init__(self, tokenizer: str = "/nowhere") -> None:
        self._lock = threading.RLock()
        self._final = threading.Condition(self._lock)
        self.sessions: dict[str, Json] = {}
        self.keys: dict[str, str] = {}
        self.numbers: dict[tuple[str, int], Operation] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, tuple[SamplerInfo, Array, int]] = {}
        self.saved: dict[str, tuple[Saved, Array]] = {}
        self.operations: dict[str, Operation] = {}
        self.executed: list[str] = []
        self.tokenizer = tokenizer
        self.busy = 0

    def models_offered(self) -> Sequence[OfferedModel]:
        return [OfferedModel("tiny", self.tokenizer, 64)]

    def create_session(self, metadata: Json, key: str | None = None) -> str:
        with self._lock:
            if key is not None and key in self.keys:
                return self.keys[key]
            name = f"s{len(self.sessions)}"
            self.sessions[name] = metadata
            if key is not None:
                self.keys[key] = name
            return name

    def session_metadata(self, session_id: str) -> Json:
        return self._get(self.sessions, session_id)

    def touch_session(self, session_id: str) -> None:
        self._get(self.sessions, session_id)

    def finish_session(self, session_id: str) -> None:
        self._get(self.sessions, session_id)

    def create_model(self, session_id: str, number: int, spec: ModelSpec) -> Operation:
        self._get(self.sessions, session_id)
        if spec.base_model != "tiny":
            raise ServiceError(f"{spec.base_model!a} is not a base model: choose tiny")
        model_id = f"{session_id}:train:{number}"
        with self._lock:
            if model_id not in self.models:
                info = ModelInfo(model_id, "tiny", self.tokenizer, "Unigram", spec.lora, 0)
                self.models[model_id] = Model(info)
            return self._done(model_id, self.models[model_id].info)

    def create_model_from(self, session_id: str, number: int, path: str, *, optimizer: bool) -> Operation:
        saved, logits = self._get(self.saved, path)
        spec = ModelSpec("tiny", self.models[saved.model_id].info.lora)
        found = self.create_model(session_id, number, spec)
        self.models[str(found.model_id)].logits = logits.copy()
        return found

    def model_info(self, model_id: str) -> ModelInfo:
        return self._get(self.models, model_id).info

    def close_model(self, model_id: str) -> None:
        self._get(self.models, model_id)

    def run_pass(self, model_id: str, seq_id: int | None, request: PassRequest) -> Operation:
        return self._enqueue(model_id, seq_id, lambda model: self._pass(model, request))

    def optim_step(self, model_id: str, seq_id: int | None, params: AdamParams) -> Operation:
        def step(model: Model) -> OptimResult:
            norm = float(np.linalg.norm(model.gradient))
            model.logits = model.logits - params.learning_rate * model.gradient
            model.gradient, model.passes = np.zeros(VOCABULARY), 0
            model.step += 1
            return OptimResult(model.step, norm, norm, params)

        return self._enqueue(model_id, seq_id, step)

    def save(
        self, model_id: str, seq_id: int | None, name: str | None, kind: SaveKind, *, overwrite: bool = False
    ) -> Operation:
        def save(model: Model) -> Saved:
            if model.passes:
                raise ServiceError("the model has gradients that no step has used: step first")
            called = name or f"save{len(self.saved)}"
            path = f"{model_id}/{kind.value}/{called}"
            if path in self.saved and not overwrite:
                raise ServiceError(f"{called} exists: choose another name")
            self.saved[path] = Saved(model_id, kind, called, path, model.step), model.logits.copy()
            return self.saved[path][0]

        return self._enqueue(model_id, seq_id, save)

    def load(self, model_id: str, seq_id: int | None, path: str, *, optimizer: bool) -> Operation:
        def load(model: Model) -> Saved:
            saved, logits = self._get(self.saved, path)
            model.logits, model.step = logits.copy(), saved.step
            return saved

        return self._enqueue(model_id, seq_id, load)

    def saves(self, model_id: str) -> Sequence[Saved]:
        self._get(self.models, model_id)
        return [saved for saved, _ in self.saved.values() if saved.model_id == model_id]

    def fail(self, model_id: str, seq_id: int, error: ServiceError) -> Operation:
        def refuse(model: Model) -> None:
            raise error

        return self._enqueue(model_id, seq_id, refuse)

    def create_sampler(
        self, session_id: str, number: int, *, path: str | None, base_model: str | None
    ) -> str:
        self._get(self.sessions, session_id)
        name = f"{session_id}:sample:{number}"
        with self._lock:
            if name not in self.samplers:
                saved, logits = self._get(self.saved, path) if path else (None, np.zeros(VOCABULARY))
                info = SamplerInfo(name, "tiny", path, self.tokenizer)
                self.samplers[name] = info, logits, saved.step if saved else 0
            return name

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        found: SamplerInfo = self._get(self.samplers, sampler_id)[0]
        return found

    def sample(self, sampler_id: str, request: SamplingRequest, number: int | None = None) -> Operation:
        if number is None:
            return self._sampled(sampler_id, request)
        if (sampler_id, number) not in self.numbers:
            self.numbers[sampler_id, number] = self._sampled(sampler_id, request)
        return self.numbers[sampler_id, number]

    def _sampled(self, sampler_id: str, request: SamplingRequest) -> Operation:
        _, logits, step = self._get(self.samplers, sampler_id)
        if len(request.prompt) + (request.max_tokens or 8) > 64:
            raise ServiceError(
                "the prompt and its completion are longer than the model's context of 64 tokens"
            )
        log_probs = _log_softmax(logits)
        sequences = []
        for index in range(request.count):
            draw = np.random.default_rng([request.seed or 0, index])
            count = request.max_tokens or 8
            if request.temperature:
                tokens = draw.choice(VOCABULARY, count, p=np.exp(_log_softmax(logits / request.temperature)))
            else:
                tokens = np.full(count, int(np.argmax(logits)))
            sequences.append(SampledSequence(tokens, log_probs[tokens], " ".join(map(str, tokens)), "length"))
        prompt = self._scored(log_probs, request.prompt) if request.prompt_logprobs else None
        return self._done(None, SamplingResult(sequences, prompt, step, request.seed or 0))

    def prompt_logprobs(self, sampler_id: str, prompt: Array) -> Operation:
        return self._done(None, self._scored(_log_softmax(self._get(self.samplers, sampler_id)[1]), prompt))

    def operation(self, operation_id: str, *, timeout: float = 0.0) -> Operation:
        with self._lock:
            self._final.wait_for(
                lambda: self._get(self.operations, operation_id).status in (Status.DONE, Status.FAILED),
                timeout,
            )
            found: Operation = self._get(self.operations, operation_id)
            return found

    def cancel(self, operation_id: str) -> Operation:
        return self.operation(operation_id)

    def health(self) -> Json:
        return {"status": "ok", "models": len(self.models)}

    def metrics(self) -> Mapping[str, float]:
        return {"operations_total": float(len(self.operations)), 'queue{model="a"}': 0.0}

    def checksum(self, names: Sequence[str]) -> str:
        """Digest of some models' logits, gradient and step."""
        digest = hashlib.sha256()
        for name in names:
            model = self.models[name]
            digest.update(
                name.encode() + model.logits.tobytes() + model.gradient.tobytes() + bytes([model.step % 256])
            )
        return digest.hexdigest()

    def _pass(self, model: Model, request: PassRequest) -> PassResult:
        if request.loss not in LOSSES:
            raise ServiceError(f"{request.loss!a} is not a loss: choose from {', '.join(LOSSES)}")
        log_probs, gradient, outputs, total = _log_softmax(model.logits), np.zeros(VOCABULARY), [], 0.0
        for datum in request.data:
            targets = datum.inputs.get("target_tokens")
            if targets is None or (targets >= VOCABULARY).any():
                raise ServiceError(f"target_tokens must be there, from 0 to {VOCABULARY - 1}")
            new = np.where(targets < 0, 0.0, log_probs[targets])
            weights = self._weights(request.loss, datum.inputs, new)
            elementwise = weights * new if request.loss != "importance_sampling" else weights
            total += float(elementwise.sum())
            outputs.append({"logprobs": new, "elementwise_loss": elementwise})
            for token, weight in zip(targets.ravel(), weights.ravel(), strict=True):
                if token >= 0:
                    gradient += weight * (np.eye(VOCABULARY)[token] - np.exp(log_probs))
        if not request.forward_only:
            model.gradient, model.passes = model.gradient + gradient, model.passes + 1
        metrics = {"loss:sum": total, "tokens:sum": float(sum(len(output["logprobs"]) for output in outputs))}
        return PassResult(outputs, metrics, [datum.id for datum in request.data])

    @staticmethod
    def _weights(loss: str, inputs: Mapping[str, Array], new: Array) -> Array:
        """dL / d log-prob of each token."""
        try:
            if loss == "importance_sampling":
                with np.errstate(over="ignore", invalid="ignore"):
                    found = -np.exp(new - inputs["logprobs"]) * inputs["advantages"]
                if not np.isfinite(found).all():
                    raise ServiceError("the loss is not finite")
                return found
            if loss == "surrogate":
                return inputs["surrogate_weights"]
            return -inputs["weights"] if loss == "cross_entropy" else np.zeros(len(new))
        except KeyError as missing:
            raise ServiceError(f"the loss {loss} needs {missing.args[0]}") from None

    def _enqueue(self, model_id: str, seq_id: int | None, run: Callable[[Model], Any]) -> Operation:
        with self._lock:
            model: Model = self._get(self.models, model_id)
            if self.busy:
                self.busy -= 1
                raise ServiceError(
                    "the queue is full: come again", code="busy", category="server", retryable=True
                )
            number = model.next if seq_id is None else seq_id
            if seq_id is not None and number in model.seen:
                return self.operations[model.seen[number]]
            found = self._new(model_id)
            if seq_id is None:
                return self._run(found.id, model, run)
            model.seen[number] = found.id
            model.waiting[number] = found.id, lambda: run(model)
            while model.next in model.waiting:
                name, ready = model.waiting.pop(model.next)
                model.next += 1
                self._run(name, model, lambda _, ready=ready: ready())
            return self.operations[found.id]

    def _run(self, name: str, model: Model, run: Callable[[Model], Any]) -> Operation:
        try:
            found = Operation(name, Status.DONE, model.info.model_id, run(model))
        except ServiceError as error:
            found = Operation(name, Status.FAILED, model.info.model_id, error=error)
        self.executed.append(name)
        self.operations[name] = found
        self._final.notify_all()
        return found

    def _new(self, model_id: str | None) -> Operation:
        found = Operation(f"op-{len(self.operations)}", Status.PENDING, model_id)
        self.operations[found.id] = found
        return found

    def _done(self, model_id: str | None, result: object) -> Operation:
        with self._lock:
            name = self._new(model_id).id
            self.operations[name] = Operation(name, Status.DONE, model_id, result)
            return self.operations[name]

    @staticmethod
    def _scored(log_probs: Array, prompt: Array) -> Array:
        if (prompt >= VOCABULARY).any():
            raise ServiceError(f"Token ids are from 0 to {VOCABULARY - 1}")
        return np.array([np.nan, *log_probs[prompt[1:]]])

    @staticmethod
    def _get(things: Mapping[str, Any], name: str) -> Any:
        try:
            return things[name]
        except KeyError:
            raise ServiceError(f"{name!a} does not exist", code="not_found") from None


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
