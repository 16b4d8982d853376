"""Tinker's protocol: JSON and protobuf, as the SDK ``tinker`` 0.18 and later speaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regress.service.api import (
    AdamParams,
    Array,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    Operation,
    OptimResult,
    PassRequest,
    PassResult,
    SamplingResult,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)
from regress.service.wires import protobuf
from regress.service.wires.fields import Fields, parse_json
from regress.service.wires.names import Addresses, save_name
from regress.service.wires.requests import loss_config, metadata_of, sampling_request
from regress.service.wires.spending import spending
from regress.service.wires.tensors import check_total, datum_of_json
from regress.service.wires.wire import Call, Reply, Route, Wait, Wire, json_reply, other_protocol

ADDRESSES = Addresses("tinker", {SaveKind.STATE: "weights", SaveKind.SAMPLER: "sampler_weights"})

_EPHEMERAL = re.compile(r"(?P<operation>[^~]+)~sampler~(?P<number>\d{1,10})")
_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


def client_config(call: Call) -> Reply:
    """Leave every setting of the client at its default."""
    return json_reply({})


def capabilities(call: Call) -> Reply:
    """List the base models."""
    models = [
        {"model_name": model.name, "max_context_length": model.max_context_length}
        for model in call.service.models_offered()
    ]
    return json_reply({"supported_models": models})


def create_session(call: Call) -> Reply:
    """Open a session of the API key's owner."""
    fields = parse_json(call.body, call.limits)
    key = ("session", call.owner, call.headers.get("x-idempotency-key", ""))
    session = call.memory.get(key) if key[2] else None
    if session is None:
        metadata = metadata_of(
            fields, call, "tags", "user_metadata", "sdk_version", "project_id", "display_name"
        )
        session = call.service.create_session(metadata)
        if key[2]:
            call.memory.put(key, session)
    return json_reply({"type": "create_session", "session_id": session})


def heartbeat(call: Call) -> Reply:
    """Keep a session alive."""
    call.service.touch_session(call.own(parse_json(call.body, call.limits).text("session_id")))
    return json_reply({"type": "session_heartbeat"})


def finish_session(call: Call) -> Reply:
    """End a session."""
    call.service.finish_session(call.own(call.path["session"]))
    return Reply(b"", 204)


def create_model(call: Call) -> Reply:
    """Create a model; a LoRA rank of 0 means full parameters."""
    fields = parse_json(call.body, call.limits)
    session = call.own(fields.text("session_id"))
    optimizer = fields.part("optimizer_config", Fields({}, "optimizer_config")).text("type", "adamw")
    if optimizer != "adamw":
        raise ServiceError("optimizer_config.type must be adamw: other optimizers are not supported.")
    metadata = metadata_of(fields, call, "user_metadata")
    spec = ModelSpec(fields.text("base_model"), _lora(fields), metadata)
    return _future(call.service.create_model(session, fields.integer("model_seq_id"), spec))


def get_info(call: Call) -> Reply:
    """Tell the facts about a model."""
    info = call.service.model_info(call.own(parse_json(call.body, call.limits).text("model_id")))
    content = {
        "type": "get_info",
        "model_id": info.model_id,
        "model_name": info.base_model,
        "model_data": {
            "model_name": info.base_model,
            "tokenizer_id": info.tokenizer,
            "arch": info.architecture,
        },
        **_adapter(info),
        "step": info.step,
        "fingerprint": dict(info.fingerprint),
    }
    return json_reply(content)


def weights_info(call: Call) -> Reply:
    """Tell of what model a save is."""
    fields = parse_json(call.body, call.limits)
    path = ADDRESSES.path(fields.text("tinker_path", limit=1024), call)
    info = call.service.model_info(path.rsplit("/", 2)[0])
    rank = (
        info.lora.rank if info.lora else 0
    )  # clients create a model of this rank, and load the save into it
    return json_reply({"base_model": info.base_model, **_adapter(info), "lora_rank": rank})


def forward_backward(call: Call) -> Reply:
    """Run a pass, forward and backward, or forward alone as the message says."""
    if call.headers.get("content-type", "").partition(";")[0].strip() == protobuf.MEDIA_TYPE:
        found = protobuf.parse_pass(call.body)
        return _numbered(
            call, found.model_id, found.seq_id, lambda: protobuf.pass_request(found, call.limits)
        )
    return _json_pass(call, "forward_backward_input", forward_only=False)


def forward(call: Call) -> Reply:
    """Run a forward pass, as SDKs before 0.25 ask for it."""
    return _json_pass(call, "forward_input", forward_only=True)


def optim_step(call: Call) -> Reply:
    """Update a model with its gradients."""
    fields = parse_json(call.body, call.limits)

    def submit(model_id: str, seq_id: int) -> Operation:
        return call.service.optim_step(model_id, seq_id, _adam(fields))

    return _spend(call, fields, submit)


def save_weights(call: Call) -> Reply:
    """Save weights and optimizer."""
    fields = parse_json(call.body, call.limits)

    def submit(model_id: str, seq_id: int) -> Operation:
        name = save_name(fields.text("path", None))
        overwrite = fields.flag("overwrite", False)
        return call.service.save(model_id, seq_id, name, SaveKind.STATE, overwrite=overwrite)

    return _spend(call, fields, submit)


def save_for_sampler(call: Call) -> Reply:
    """Save weights for sampling, under a name or for a sampler that is opened at once."""
    fields = parse_json(call.body, call.limits)
    number = fields.values.get("sampling_session_seq_id")
    ephemeral = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31

    def submit(model_id: str, seq_id: int) -> Operation:
        fields.integer("sampling_session_seq_id", None)
        kind = fields.text("kind", "snapshot")
        if kind != "snapshot":
            fields.refuse("kind", "must be snapshot", kind)
        name = None if ephemeral else save_name(fields.text("path", None))
        overwrite = fields.flag("overwrite", False)
        return call.service.save(model_id, seq_id, name, SaveKind.SAMPLER, overwrite=overwrite)

    return _spend(call, fields, submit, f"~sampler~{number}" if ephemeral else "")


def load_weights(call: Call) -> Reply:
    """Load a save into a model, or create a model of it."""
    fields = parse_json(call.body, call.limits)
    if "model_id" in fields:

        def submit(model_id: str, seq_id: int) -> Operation:
            path = ADDRESSES.path(fields.text("path", limit=1024), call)
            return call.service.load(model_id, seq_id, path, optimizer=fields.flag("optimizer", False))

        return _spend(call, fields, submit)
    session = call.own(fields.text("session_id"))
    path = ADDRESSES.path(fields.text("path", limit=1024), call)
    number, optimizer = fields.integer("model_seq_id"), fields.flag("optimizer", False)
    return _future(call.service.create_model_from(session, number, path, optimizer=optimizer))


def unload_model(call: Call) -> Reply:
    """Close a model."""
    model_id = call.own(parse_json(call.body, call.limits).text("model_id"))
    call.service.close_model(model_id)
    return json_reply({"request_id": f"closed~{model_id}", "model_id": model_id})


def create_sampler(call: Call) -> Reply:
    """Open saved weights, or a base model, for sampling."""
    fields = parse_json(call.body, call.limits)
    session = call.own(fields.text("session_id"))
    address = fields.text("model_path", None, limit=1024)
    sampler = call.service.create_sampler(
        session,
        fields.integer("sampling_session_seq_id"),
        path=ADDRESSES.path(address, call) if address else None,
        base_model=None if address else fields.text("base_model"),
    )
    return json_reply({"type": "create_sampling_session", "sampling_session_id": sampler})


def get_sampler(call: Call) -> Reply:
    """Tell the facts about a sampler."""
    info = call.service.sampler_info(call.own(call.path["sampler"]))
    content = {"sampler_id": info.sampler_id, "base_model": info.base_model}
    return json_reply(content | ({"model_path": ADDRESSES.of_path(info.path)} if info.path else {}))


def sample(call: Call) -> Reply:
    """Sample completions; the same number of the same sampler again is the same operation."""
    fields = parse_json(call.body, call.limits)
    sampler = call.own(fields.text("sampling_session_id"))
    for name in _UNSUPPORTED:
        if fields.integer(name, 0):
            raise ServiceError(f"{name} is not supported: ask for prompt_logprobs.")
    if "target_prompt_logprobs" in fields:
        raise ServiceError("target_prompt_logprobs is not supported: ask for prompt_logprobs.")
    request = sampling_request(fields, call.limits, prompt_logprobs=fields.flag("prompt_logprobs", False))
    number = fields.integer("seq_id", None)
    key = ("sample", sampler, str(number))
    found = call.memory.get(key) if number is not None else None
    if found is None:
        found = call.service.sample(sampler, request).id
        if number is not None:
            call.memory.put(key, found)
    ids = [f"{found}~{index}" for index in range(request.count)]
    return json_reply({"request_id": found, "sample_sequence_ids": ids})


def retrieve(call: Call) -> Reply | Wait:
    """Tell the result of a future, when it is there."""
    request_id = parse_json(call.body, call.limits).text("request_id", limit=512)
    if request_id.startswith("closed~"):
        model_id = call.own(request_id.removeprefix("closed~"))
        return json_reply({"type": "unload_model", "model_id": model_id})
    ephemeral = _EPHEMERAL.fullmatch(request_id)
    operation = call.service.operation(ephemeral["operation"] if ephemeral else request_id)
    if operation.model_id is not None:
        call.own(operation.model_id)
    binary = protobuf.MEDIA_TYPE in call.headers.get("accept", "")

    def then(found: Operation) -> Reply:
        if ephemeral and found.status is Status.DONE:
            return _ephemeral(call, found, int(ephemeral["number"]))
        return _state(found, binary=binary)

    return Wait(operation.id, call.limits.poll_seconds, then)


def cancel(call: Call) -> Reply:
    """Cancel a request that does not run yet."""
    request_id = parse_json(call.body, call.limits).text("request_id", limit=512).partition("~")[0]
    operation = call.service.operation(request_id)
    if operation.model_id is not None:
        call.own(operation.model_id)
    call.service.cancel(request_id)
    return json_reply({})


def telemetry(call: Call) -> Reply:
    """Accept what the client tells about itself, and drop it."""
    return json_reply({"status": "accepted"})


def _json_pass(call: Call, name: str, *, forward_only: bool) -> Reply:
    fields = parse_json(call.body, call.limits)

    def read() -> PassRequest:
        part = fields.part(name)
        data = [datum_of_json(datum, call.limits) for datum in part.parts("data", limit=call.limits.data)]
        check_total(data, call.limits)
        return PassRequest(data, part.text("loss_fn"), loss_config(part), forward_only)

    return _numbered(call, fields.text("model_id"), fields.integer("seq_id", low=1), read)


def _numbered(call: Call, model_id: str, seq_id: int, read: Callable[[], PassRequest]) -> Reply:
    if seq_id < 1:
        raise ServiceError("seq_id is missing: number the requests of a model from 1.")
    call.own(model_id)
    operation, _ = spending(
        call.service, model_id, seq_id, lambda: call.service.run_pass(model_id, seq_id, read())
    )
    assert operation is not None
    return _future(operation)


def _spend(call: Call, fields: Fields, submit: Callable[[str, int], Operation], suffix: str = "") -> Reply:
    """Answer a future for a numbered request, whatever its content: a 4xx would leave a hole in the numbers."""
    model_id = call.own(fields.text("model_id"))
    seq_id = fields.integer("seq_id", low=1)
    operation, error = spending(call.service, model_id, seq_id, lambda: submit(model_id, seq_id))
    assert operation is not None
    return _future(operation, "" if error else suffix)


def _future(operation: Operation, suffix: str = "") -> Reply:
    content = {"request_id": operation.id + suffix}
    return json_reply(content | ({"model_id": operation.model_id} if operation.model_id else {}))


def _lora(fields: Fields) -> LoraSpec | None:
    config = fields.part("lora_config", Fields({}, "lora_config"))
    rank = config.integer("rank", 32, high=4096)
    if rank == 0:
        return None
    return LoraSpec(
        rank=rank,
        seed=config.integer("seed", None, low=-(2**63), high=2**63 - 1),
        train_unembed=config.flag("train_unembed", True),
        train_mlp=config.flag("train_mlp", True),
        train_attn=config.flag("train_attn", True),
    )


def _adam(fields: Fields) -> AdamParams:
    """Return the settings of a step; SDKs up to 0.14 leave out those at their defaults."""
    if "optimizer_params" in fields:
        raise ServiceError("optimizer_params are not supported: send adam_params.")
    params = fields.part("adam_params", Fields({}, "adam_params"))
    return AdamParams(
        learning_rate=params.number("learning_rate", 1e-4, low=0),
        beta1=params.number("beta1", 0.9, low=0),
        beta2=params.number("beta2", 0.95, low=0),
        eps=params.number("eps", 1e-12, low=0),
        weight_decay=params.number("weight_decay", 0.0, low=0),
        grad_clip_norm=params.number("grad_clip_norm", 0.0, low=0),
    )


def _adapter(info: ModelInfo) -> dict[str, Any]:
    """Return what the adapter of a model is: a model without one has no LoRA."""
    if info.lora is None:
        return {"is_lora": False}
    return {
        "is_lora": True,
        "lora_rank": info.lora.rank,
        "train_unembed": info.lora.train_unembed,
        "train_mlp": info.lora.train_mlp,
        "train_attn": info.lora.train_attn,
    }


def _ephemeral(call: Call, found: Operation, number: int) -> Reply:
    """Open the sampler of a save without a name."""
    saved: Saved = found.result
    session = call.own(saved.model_id).partition(":")[0]
    sampler = call.service.create_sampler(session, number, path=saved.path, base_model=None)
    return json_reply({"type": "save_weights_for_sampler", "sampling_session_id": sampler})


def _state(operation: Operation, *, binary: bool) -> Reply:
    if operation.status is Status.FAILED:
        assert operation.error is not None
        return json_reply({"error": str(operation.error), "category": operation.error.category})
    if operation.status is not Status.DONE:
        content = {"type": "try_again", "request_id": operation.id, "queue_state": "active"}
        return json_reply(content, 408)
    result = operation.result
    if binary and isinstance(result, PassResult):
        return Reply(protobuf.pass_output(result), media_type=protobuf.MEDIA_TYPE)
    if binary and isinstance(result, SamplingResult):
        return Reply(protobuf.samples(result), media_type=protobuf.MEDIA_TYPE)
    return json_reply(_result(result))


def _result(result: object) -> Mapping[str, Any]:
    if isinstance(result, PassResult):
        outputs = [{name: _tensor(array) for name, array in output.items()} for output in result.outputs]
        return {
            "loss_fn_output_type": protobuf.OUTPUT_TYPE,
            "loss_fn_outputs": outputs,
            "metrics": dict(result.metrics),
        }
    if isinstance(result, OptimResult):
        return {"type": "optim_step", "metrics": result.metrics}
    if isinstance(result, ModelInfo):
        return {"model_id": result.model_id}  # without a type: load_weights creates models, too
    if isinstance(result, Saved):
        return {"path": ADDRESSES.of(result), "model_id": result.model_id}
    if isinstance(result, SamplingResult):
        return _samples(result)
    raise other_protocol()


def _samples(result: SamplingResult) -> dict[str, Any]:
    sequences = [
        {
            "tokens": sequence.tokens.tolist(),
            "logprobs": _numbers(sequence.logprobs),
            "stop_reason": sequence.stop_reason,
        }
        for sequence in result.sequences
    ]
    found: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = _numbers(result.prompt_logprobs)
    return found


def _tensor(array: Array) -> dict[str, Any]:
    return {"data": _numbers(array), "dtype": "float32", "shape": list(array.shape)}


def _numbers(array: Array) -> list[float | None]:
    rounded = array.astype(np.float32)
    return [float(value) if np.isfinite(value) else None for value in rounded]


TINKER = Wire(
    name="tinker",
    key_header="x-api-key",
    busy=429,
    routes=(
        Route("POST", "/api/v1/client/config", client_config),
        Route("POST", "/api/v1/client/dynamic_config", client_config),
        Route("GET", "/api/v1/get_server_capabilities", capabilities),
        Route("POST", "/api/v1/create_session", create_session),
        Route("POST", "/api/v1/session_heartbeat", heartbeat),
        Route("POST", "/api/v1/sessions/{session}/finish", finish_session),
        Route("POST", "/api/v1/create_model", create_model),
        Route("POST", "/api/v1/get_info", get_info),
        Route("POST", "/api/v1/weights_info", weights_info),
        Route("POST", "/api/v1/unload_model", unload_model),
        Route("POST", "/api/v1/forward_backward", forward_backward),
        Route("POST", "/api/v1/forward", forward),
        Route("POST", "/api/v1/optim_step", optim_step),
        Route("POST", "/api/v1/save_weights", save_weights),
        Route("POST", "/api/v1/save_weights_for_sampler", save_for_sampler),
        Route("POST", "/api/v1/load_weights", load_weights),
        Route("POST", "/api/v1/create_sampling_session", create_sampler),
        Route("GET", "/api/v1/samplers/{sampler}", get_sampler),
        Route("POST", "/api/v1/asample", sample),
        Route("POST", "/api/v1/retrieve_future", retrieve),
        Route("POST", "/api/v1/cancel_future", cancel),
        Route("POST", "/api/v1/telemetry", telemetry),
    ),
)
