"""Tinker's protocol: JSON and protobuf, as the SDK ``tinker`` 0.18 and later speaks it."""

from __future__ import annotations

import re
from collections.abc import Callable

from regress.service.api import (
    AdamParams,
    ModelSpec,
    Operation,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)
from regress.service.wires import protobuf
from regress.service.wires.fields import Fields, parse_json
from regress.service.wires.names import save_name
from regress.service.wires.requests import (
    adam_of,
    batch_limits,
    lora_of,
    metadata_of,
    open_sampler,
    pass_of,
    sampling_request,
    spending,
)
from regress.service.wires.tinker_results import ADDRESSES, future_reply, shown_adapter
from regress.service.wires.wire import Call, Reply, Route, Wait, Wire, json_reply

_ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
"""Settings of a step; SDKs up to 0.14 leave out those at their defaults."""
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
    metadata = metadata_of(fields, call, "tags", "user_metadata", "sdk_version", "project_id", "display_name")
    key = call.headers.get("x-idempotency-key")
    session = call.service.create_session(metadata, key=f"{call.owner} {key}" if key else None)
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
        raise ServiceError("optimizer_config.type must be adamw; other optimizers are not supported")
    metadata = metadata_of(fields, call, "user_metadata")
    lora = lora_of(fields.part("lora_config", Fields({}, "lora_config")), rank=32, train_unembed=True)
    spec = ModelSpec(fields.text("base_model"), lora, metadata)
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
        **shown_adapter(info),
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
    return json_reply({"base_model": info.base_model, **shown_adapter(info), "lora_rank": rank})


def forward_backward(call: Call) -> Reply:
    """Run a pass, forward and backward, or forward alone as the message says."""
    if call.headers.get("content-type", "").partition(";")[0].strip() == protobuf.MEDIA_TYPE:
        found = protobuf.parse_pass(call.body)

        def submit(model_id: str, seq_id: int) -> Operation:
            return call.service.run_pass(model_id, seq_id, protobuf.pass_request(found, call.limits))

        return _numbered(call, found.model_id, found.seq_id, submit)
    return _json_pass(call, "forward_backward_input", forward_only=False)


def forward(call: Call) -> Reply:
    """Run a forward pass, as SDKs before 0.25 ask for it."""
    return _json_pass(call, "forward_input", forward_only=True)


def optim_step(call: Call) -> Reply:
    """Update a model with its gradients."""
    fields = parse_json(call.body, call.limits, numbered=True)

    def submit(model_id: str, seq_id: int) -> Operation:
        return call.service.optim_step(model_id, seq_id, _adam(fields))

    return _spend(call, fields, submit)


def save_weights(call: Call) -> Reply:
    """Save weights and optimizer."""
    fields = parse_json(call.body, call.limits, numbered=True)

    def submit(model_id: str, seq_id: int) -> Operation:
        name = save_name(fields.text("path", None))
        overwrite = fields.flag("overwrite", False)
        return call.service.save(model_id, seq_id, name, SaveKind.STATE, overwrite=overwrite)

    return _spend(call, fields, submit)


def save_for_sampler(call: Call) -> Reply:
    """Save weights for sampling, under a name or for a sampler that is opened at once."""
    fields = parse_json(call.body, call.limits, numbered=True)
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
    fields = parse_json(call.body, call.limits, numbered=True)
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
    sampler = open_sampler(call, session, fields, ADDRESSES)
    told = {"type": "create_sampling_session", "sampling_session_id": sampler}
    return json_reply({**told, "batch": batch_limits(call.limits)})


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
            raise ServiceError(f"{name} is not supported; ask for prompt_logprobs")
    if "target_prompt_logprobs" in fields:
        raise ServiceError("target_prompt_logprobs is not supported; ask for prompt_logprobs")
    request = sampling_request(fields, call.limits, prompt_logprobs=fields.flag("prompt_logprobs", False))
    found = call.service.sample(sampler, request, number=fields.integer("seq_id", None)).id
    ids = [f"{found}~{index}" for index in range(request.count + len(request.rows))]
    return json_reply({"request_id": found, "sample_sequence_ids": ids})


def retrieve(call: Call) -> Reply | Wait:
    """Tell the result of a future, when it is there."""
    request_id = parse_json(call.body, call.limits).text("request_id", limit=512)
    if request_id.startswith("closed~"):
        model_id = call.own(request_id.removeprefix("closed~"))
        return json_reply({"type": "unload_model", "model_id": model_id})
    ephemeral = _EPHEMERAL.fullmatch(request_id)
    operation = call.operation(ephemeral["operation"] if ephemeral else request_id)
    binary = protobuf.MEDIA_TYPE in call.headers.get("accept", "")

    def then(found: Operation) -> Reply:
        if ephemeral and found.status is Status.DONE:
            return _ephemeral(call, found, int(ephemeral["number"]))
        return future_reply(found, binary=binary)

    return Wait(operation.id, call.limits.poll_seconds, then)


def cancel(call: Call) -> Reply:
    """Cancel a request that does not run yet."""
    request_id = parse_json(call.body, call.limits).text("request_id", limit=512)
    call.service.cancel(call.operation(request_id.partition("~")[0]).id)
    return json_reply({})


def telemetry(call: Call) -> Reply:
    """Accept what the client tells about itself, and drop it."""
    return json_reply({"status": "accepted"})


def _json_pass(call: Call, name: str, *, forward_only: bool) -> Reply:
    fields = parse_json(call.body, call.limits, numbered=True)

    def submit(model_id: str, seq_id: int) -> Operation:
        request = pass_of(fields.part(name), call.limits, forward_only=forward_only, several=True)
        return call.service.run_pass(model_id, seq_id, request)

    return _spend(call, fields, submit)


def _spend(call: Call, fields: Fields, submit: Callable[[str, int], Operation], suffix: str = "") -> Reply:
    model_id, seq_id = fields.text("model_id"), fields.integer("seq_id", low=1)
    return _numbered(call, model_id, seq_id, submit, fields.problem, suffix)


def _numbered(
    call: Call,
    model_id: str,
    seq_id: int,
    submit: Callable[[str, int], Operation],
    problem: ServiceError | None = None,
    suffix: str = "",
) -> Reply:
    """Answer a future for a numbered request, whatever its content: a 4xx would leave a hole in the numbers."""
    if seq_id < 1:
        raise ServiceError("seq_id is missing; number the requests of a model from 1")
    call.own(model_id)
    operation, error = spending(call.service, model_id, seq_id, lambda: submit(model_id, seq_id), problem)
    assert operation is not None
    return _future(operation, "" if error else suffix)


def _future(operation: Operation, suffix: str = "") -> Reply:
    content = {"request_id": operation.id + suffix}
    return json_reply(content | ({"model_id": operation.model_id} if operation.model_id else {}))


def _adam(fields: Fields) -> AdamParams:
    if "optimizer_params" in fields:
        raise ServiceError("optimizer_params are not supported; send adam_params")
    return adam_of(fields.part("adam_params", Fields({}, "adam_params")), _ADAM)


def _ephemeral(call: Call, found: Operation, number: int) -> Reply:
    """Open the sampler of a save without a name."""
    saved: Saved = found.result
    session = call.own(saved.model_id).partition(":")[0]
    sampler = call.service.create_sampler(session, number, path=saved.path, base_model=None)
    return json_reply({"type": "save_weights_for_sampler", "sampling_session_id": sampler})


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
