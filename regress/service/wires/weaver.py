"""Weaver's protocol: JSON, as the SDK ``nex-weaver`` 1.4 and later speaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regress.service.api import (
    AdamParams,
    Array,
    Datum,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    Operation,
    OptimResult,
    PassRequest,
    PassResult,
    SampledSequence,
    SamplingResult,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)
from regress.service.wires.fields import Fields, parse_json
from regress.service.wires.names import Addresses, save_name
from regress.service.wires.requests import loss_config, metadata_of, sampling_request
from regress.service.wires.spending import spending
from regress.service.wires.tensors import check_total, datum_of_json, tokens_of_json
from regress.service.wires.wire import Call, Reply, Route, Wait, Wire, error_reply, json_reply, other_protocol

_CREATE_SECONDS = 50.0

_KINDS = {
    "weight": SaveKind.WEIGHTS,
    "weight_and_optimizer": SaveKind.STATE,
    "sampling": SaveKind.SAMPLER,
}
_TYPES = {kind: name for name, kind in _KINDS.items()}
ADDRESSES = Addresses(
    "weaver", {SaveKind.STATE: "checkpoints", SaveKind.WEIGHTS: "weights", SaveKind.SAMPLER: "sampler"}
)


def create_session(call: Call) -> Reply:
    """Open a session of the API key's owner."""
    fields = parse_json(call.body, call.limits)
    metadata = metadata_of(fields, call, "sdk_version", "name", "tags", "user_metadata", "labels")
    return json_reply({"id": call.service.create_session(metadata)}, 201)


def get_session(call: Call) -> Reply:
    """Tell that a session exists."""
    return json_reply({"id": call.own(call.path["session"]), "status": "active"})


def heartbeat(call: Call) -> Reply:
    """Keep a session alive."""
    session = call.own(call.path["session"])
    call.service.touch_session(session)
    return json_reply({"id": session})


def finish_session(call: Call) -> Reply:
    """End a session."""
    call.service.finish_session(call.own(call.path["session"]))
    return json_reply({})


def create_model(call: Call) -> Wait:
    """Create a model, and answer when it is there."""
    session = call.own(call.path["session"])
    fields = parse_json(call.body, call.limits)
    mode = fields.text("training_mode", None)
    if mode not in (None, "lora", "full_ft"):
        fields.refuse("training_mode", "must be lora or full_ft", mode)
    lora = None if mode == "full_ft" else _lora(fields)
    if mode == "lora" and lora is None:
        raise ServiceError(
            "training_mode is lora, but lora_config.rank is 0 or missing: send a rank, or full_ft."
        )
    spec = ModelSpec(fields.text("base_model"), lora, metadata_of(fields, call, "user_metadata", "name"))
    operation = call.service.create_model(session, fields.integer("model_seq_id"), spec)
    return Wait(operation.id, _CREATE_SECONDS, _created)


def supported_models(call: Call) -> Reply:
    """List the base models."""
    items = [
        {
            "name": model.name,
            "status": "available",
            "config": {
                "resource": {"tokenizer": {"path": model.tokenizer}},
                "max_context_length": model.max_context_length,
            },
        }
        for model in call.service.models_offered()
    ]
    return json_reply({"items": items, "pagination": {"total_count": len(items)}})


def forward_backward(call: Call) -> Reply | Wait:
    """Run a forward and a backward pass."""
    return _pass(call, "forward_backward_input", forward_only=False)


def forward(call: Call) -> Reply | Wait:
    """Run a forward pass."""
    return _pass(call, "forward_input", forward_only=True)


def optimizer_step(call: Call) -> Reply | Wait:
    """Update a model with its gradients."""
    payload = _payload(call)

    def submit(model_id: str, seq_id: int | None) -> Operation:
        return call.service.optim_step(model_id, seq_id, _adam(payload.part("adam_params")))

    return _numbered(call, payload, submit)


def export_sampler(call: Call) -> Reply | Wait:
    """Save weights for sampling."""
    fields = parse_json(call.body, call.limits)

    def submit(model_id: str, seq_id: int | None) -> Operation:
        name = save_name(fields.text("path", None))
        return call.service.save(model_id, seq_id, name, SaveKind.SAMPLER)

    return _numbered(call, fields, submit)


def save_checkpoint(call: Call) -> Reply | Wait:
    """Save a model after everything that has been accepted so far."""
    fields = parse_json(call.body, call.limits)
    kind = fields.text("type", "weight")
    if kind not in _KINDS:
        fields.refuse("type", f"must be one of {', '.join(_KINDS)}", kind)
    name = save_name(fields.text("name", None))
    model_id = call.own(call.path["model"])
    return _wait(call, call.service.save(model_id, None, name, _KINDS[kind]))


def list_checkpoints(call: Call) -> Reply:
    """List the saves of a model."""
    saves = call.service.saves(call.own(call.path["model"]))
    return json_reply({"items": [_checkpoint(saved) for saved in saves]})


def load(call: Call) -> Reply | Wait:
    """Load a save after everything that has been accepted so far."""
    fields = parse_json(call.body, call.limits)
    path = ADDRESSES.path(fields.text("path", limit=1024), call)
    optimizer = fields.flag("include_optimizer", False)
    return _wait(call, call.service.load(call.own(call.path["model"]), None, path, optimizer=optimizer))


def terminate(call: Call) -> Reply:
    """Close a model."""
    call.service.close_model(call.own(call.path["model"]))
    return json_reply({"id": call.path["model"], "status": "terminated"})


def create_sampler(call: Call) -> Reply:
    """Open saved weights, or a base model, for sampling."""
    session = call.own(call.path["session"])
    fields = parse_json(call.body, call.limits)
    address = fields.text("model_path", None, limit=1024)
    sampler = call.service.create_sampler(
        session,
        fields.integer("sampling_session_seq_id"),
        path=ADDRESSES.path(address, call) if address else None,
        base_model=None if address else fields.text("base_model"),
    )
    info = call.service.sampler_info(sampler)
    return json_reply({"id": sampler, "tokenizer_path": info.tokenizer, "base_model": info.base_model}, 201)


def sample(call: Call) -> Reply | Wait:
    """Sample completions."""
    sampler = call.own(call.path["sampler"])
    fields = parse_json(call.body, call.limits)
    if fields.integer("topk_prompt_logprobs", 0):
        raise ServiceError("topk_prompt_logprobs is not supported: ask for prompt_logprobs.")
    request = sampling_request(fields, call.limits, prompt_logprobs=fields.flag("prompt_logprobs", False))
    return _wait(call, call.service.sample(sampler, request))


def logprobs(call: Call) -> Reply | Wait:
    """Compute the log-probs of a prompt."""
    sampler = call.own(call.path["sampler"])
    prompt = tokens_of_json(parse_json(call.body, call.limits).part("prompt"), call.limits)
    return _wait(call, call.service.prompt_logprobs(sampler, prompt))


def get_operation(call: Call) -> Wait:
    """Tell the state of an operation, when it has ended or after a while."""
    operation = call.service.operation(call.path["operation"])
    if operation.model_id is not None:
        call.own(operation.model_id)
    return Wait(operation.id, call.limits.poll_seconds, _state)


def _pass(call: Call, name: str, *, forward_only: bool) -> Reply | Wait:
    if call.headers.get("content-type", "").startswith("multipart/"):
        raise ServiceError(
            "The tensor transport http-binary is not supported: leave WEAVER_TENSOR_TRANSPORT at its default.",
            code="unsupported_media_type",
        )
    payload = _payload(call)

    def submit(model_id: str, seq_id: int | None) -> Operation:
        transport = payload.text("tensor_transport", "default")
        if transport != "default":
            payload.refuse("tensor_transport", "must be default", transport)
        fields = payload.part(name)
        data = [datum_of_json(datum, call.limits) for datum in fields.parts("data", limit=call.limits.data)]
        check_total(data, call.limits)
        _check_ids(data)
        request = PassRequest(data, fields.text("loss_fn"), loss_config(fields), forward_only)
        return call.service.run_pass(model_id, seq_id, request)

    return _numbered(call, payload, submit)


def _numbered(call: Call, fields: Fields, submit: Callable[[str, int | None], Operation]) -> Reply | Wait:
    """Submit a request of a model; a refused one spends its number, too, as the client does not use it again."""
    model_id = call.own(call.path["model"])
    seq_id = fields.integer("seq_id", None, low=1)
    named = fields.text("model_id", model_id)
    if named != model_id:
        fields.refuse("model_id", "must be the model of the path", named)
    operation, error = spending(call.service, model_id, seq_id, lambda: submit(model_id, seq_id))
    if error is not None:
        return error_reply(error)
    assert operation is not None
    return _wait(call, operation)


def _wait(call: Call, operation: Operation) -> Wait:
    return Wait(operation.id, call.limits.answer_seconds, _accepted)


def _payload(call: Call) -> Fields:
    return parse_json(call.body, call.limits).part("payload")  # type: ignore[no-any-return]


def _lora(fields: Fields) -> LoraSpec | None:
    config = fields.part("lora_config", None)
    if config is None or not config.integer("rank", high=4096):
        return None
    return LoraSpec(
        rank=config.integer("rank", high=4096),
        seed=config.integer("seed", None, low=-(2**63), high=2**63 - 1),
        train_unembed=config.flag("train_unembed", False),
        train_mlp=config.flag("train_mlp", True),
        train_attn=config.flag("train_attn", True),
    )


def _adam(fields: Fields) -> AdamParams:
    """Return the settings of a step, whose defaults are the SDK's."""
    return AdamParams(
        learning_rate=fields.number("learning_rate", 1e-4, low=0),
        beta1=fields.number("beta1", 0.9, low=0),
        beta2=fields.number("beta2", 0.95, low=0),
        eps=fields.number("eps", 1e-8, low=0),
        weight_decay=fields.number("weight_decay", 1e-2, low=0),
        grad_clip_norm=fields.number("grad_clip_norm", 1.0, low=0),
    )


def _check_ids(data: list[Datum]) -> None:
    named = [datum.id for datum in data if datum.id is not None]
    if len(set(named)) != len(named):
        raise ServiceError("Two datums have the same datum_id: give each its own.")


def _created(operation: Operation) -> Reply:
    if operation.status is Status.FAILED:
        assert operation.error is not None
        return error_reply(operation.error)
    if operation.status is not Status.DONE:
        raise ServiceError(
            "The model is still being created: ask again.", code="busy", category="server", retryable=True
        )
    return json_reply(_model(operation.result), 201)


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.model_id,
        "base_model": info.base_model,
        "tokenizer_path": info.tokenizer,
        "debug_info": {"fingerprint": dict(info.fingerprint), "step": info.step},
    }


def _accepted(operation: Operation) -> Reply:
    """Answer a POST; SDKs before 1.19 take a failed operation there for a result, and hear of it when they poll."""
    if operation.status is Status.FAILED:
        return json_reply({"id": operation.id, "status": "pending"})
    return _state(operation)


def _state(operation: Operation) -> Reply:
    content: dict[str, Any] = {"id": operation.id, "status": operation.status.value}
    if operation.status is Status.FAILED:
        assert operation.error is not None
        content |= {
            "status": "error",
            "error": str(operation.error),  # which SDKs before 1.19 show
            "error_code": operation.error.code,
            "error_message": str(operation.error),
            "error_details": {"category": operation.error.category},
            "retryable": operation.error.retryable,
        }
    elif operation.status is Status.DONE:
        content["response"] = _result(operation.result)
    return json_reply(content)


def _result(result: object) -> dict[str, Any]:
    if isinstance(result, PassResult):
        return {"result": {"loss_fn_outputs": _outputs(result), "metrics": _metrics(result)}}
    if isinstance(result, ModelInfo):
        return _model(result)
    if isinstance(result, OptimResult):
        return {"metrics": result.metrics, "step": result.step}
    if isinstance(result, Saved):
        return _checkpoint(result)
    if isinstance(result, SamplingResult):
        found = {"sequences": [_sequence(sequence) for sequence in result.sequences]}
        if result.prompt_logprobs is not None:
            found["prompt_logprobs"] = _numbers(result.prompt_logprobs)  # type: ignore[assignment]
        return {"result": {**found, "step": result.step, "seed": result.seed}}
    if isinstance(result, np.ndarray):
        return {"result": {"prompt_logprobs": _numbers(result)}}
    raise other_protocol()


def _outputs(result: PassResult) -> list[dict[str, Any]]:
    ids = result.datum_ids or [None] * len(result.outputs)
    found = []
    for output, datum_id in zip(result.outputs, ids, strict=True):
        shown: dict[str, Any] = {
            name: {"data": _numbers(array), "dtype": "float32"} for name, array in output.items()
        }
        if datum_id is not None:
            shown["datum_id"] = datum_id
        found.append(shown)
    return found


def _metrics(result: PassResult) -> Mapping[str, float]:
    """Return the metrics with ``loss`` beside ``loss:sum``: NexRL reads the first, and takes 0.0 if it is missing."""
    metrics = dict(result.metrics)
    if "loss:sum" in metrics:
        metrics["loss"] = metrics["loss:sum"]
    return metrics


def _checkpoint(saved: Saved) -> dict[str, Any]:
    address = ADDRESSES.of(saved)
    return {
        "id": address,
        "path": address,
        "model_path": address,
        "name": saved.name,
        "checkpoint_type": _TYPES[saved.kind],
        "status": "completed",
        "step": saved.step,
    }


def _sequence(sequence: SampledSequence) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens.tolist(),
        "logprobs": _numbers(sequence.logprobs),
        "stop_reason": sequence.stop_reason,
        "text": sequence.text,
    }


def _numbers(array: Array) -> list[float | None]:
    """Return numbers as float32, and None for those that JSON has not."""
    rounded = array.astype(np.float32)
    if np.isfinite(rounded).all():
        return rounded.tolist()  # type: ignore[no-any-return]
    return [float(value) if np.isfinite(value) else None for value in rounded]


WEAVER = Wire(
    name="weaver",
    key_header="x-weaver-api-key",
    busy=503,
    routes=(
        Route("POST", "/api/v1/sessions", create_session),
        Route("GET", "/api/v1/sessions/{session}", get_session),
        Route("POST", "/api/v1/sessions/{session}/heartbeat", heartbeat, empty=True),
        Route("DELETE", "/api/v1/sessions/{session}", finish_session, empty=True),
        Route("POST", "/api/v1/sessions/{session}/models", create_model),
        Route("GET", "/api/v1/supported-models", supported_models),
        Route("POST", "/api/v1/models/{model}/forward-backward-passes", forward_backward),
        Route("POST", "/api/v1/models/{model}/forward-passes", forward),
        Route("POST", "/api/v1/models/{model}/optimizer-steps", optimizer_step),
        Route("POST", "/api/v1/models/{model}/export-sampler", export_sampler),
        Route("POST", "/api/v1/models/{model}/checkpoints", save_checkpoint),
        Route("GET", "/api/v1/models/{model}/checkpoints", list_checkpoints),
        Route("POST", "/api/v1/models/{model}/load", load),
        Route("POST", "/api/v1/models/{model}/terminate", terminate, empty=True),
        Route("POST", "/api/v1/sessions/{session}/sampling-sessions", create_sampler),
        Route("POST", "/api/v1/sampling-sessions/{sampler}/samples", sample),
        Route("POST", "/api/v1/sampling-sessions/{sampler}/logprobs", logprobs),
        Route("GET", "/api/v1/operations/{operation}", get_operation),
    ),
)
