"""Weaver's protocol: JSON, as the SDK ``nex-weaver`` 1.4 and later speaks it."""

from __future__ import annotations

from collections.abc import Callable

from regress.service.api import (
    AdamParams,
    ModelSpec,
    Operation,
    SaveKind,
    ServiceError,
)
from regress.service.wires.fields import Fields, parse_json
from regress.service.wires.names import save_name
from regress.service.wires.requests import (
    adam_of,
    batch_limits,
    lora_of,
    metadata_of,
    open_sampler,
    pass_of,
    rows_of,
    sampling_request,
    spending,
)
from regress.service.wires.tensors import tokens_of_json
from regress.service.wires.weaver_results import (
    ADDRESSES,
    KINDS,
    accepted_reply,
    created_reply,
    shown_save,
    state_reply,
)
from regress.service.wires.wire import Call, Reply, Route, Wait, Wire, error_reply, json_reply

_CREATE_SECONDS = 50.0
_ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=1e-2, grad_clip_norm=1.0)
"""Settings of a step that are left out, as the SDK has them."""


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
    config = fields.part("lora_config", None)
    lora = None
    if mode != "full_ft" and config is not None:
        lora = lora_of(config, rank=None, train_unembed=False)
    if mode == "lora" and lora is None:
        raise ServiceError(
            "training_mode is lora, but lora_config.rank is 0 or missing; send a rank, or full_ft"
        )
    spec = ModelSpec(fields.text("base_model"), lora, metadata_of(fields, call, "user_metadata", "name"))
    operation = call.service.create_model(session, fields.integer("model_seq_id"), spec)
    return Wait(operation.id, _CREATE_SECONDS, created_reply)


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
        return call.service.optim_step(model_id, seq_id, adam_of(payload.part("adam_params"), _ADAM))

    return _numbered(call, payload, submit)


def export_sampler(call: Call) -> Reply | Wait:
    """Save weights for sampling."""
    fields = parse_json(call.body, call.limits, numbered=True)

    def submit(model_id: str, seq_id: int | None) -> Operation:
        name = save_name(fields.text("path", None))
        return call.service.save(model_id, seq_id, name, SaveKind.SAMPLER)

    return _numbered(call, fields, submit)


def save_checkpoint(call: Call) -> Reply | Wait:
    """Save a model after everything that has been accepted so far."""
    fields = parse_json(call.body, call.limits)
    kind = fields.text("type", "weight")
    if kind not in KINDS:
        fields.refuse("type", f"must be one of {', '.join(KINDS)}", kind)
    name = save_name(fields.text("name", None))
    model_id = call.own(call.path["model"])
    return _wait(call, call.service.save(model_id, None, name, KINDS[kind]))


def list_checkpoints(call: Call) -> Reply:
    """List the saves of a model."""
    saves = call.service.saves(call.own(call.path["model"]))
    return json_reply({"items": [shown_save(saved) for saved in saves]})


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
    sampler = open_sampler(call, session, fields, ADDRESSES)
    info = call.service.sampler_info(sampler)
    told = {"id": sampler, "tokenizer_path": info.tokenizer, "base_model": info.base_model}
    return json_reply({**told, "batch": batch_limits(call.limits)}, 201)


def sample(call: Call) -> Reply | Wait:
    """Sample completions."""
    sampler = call.own(call.path["sampler"])
    fields = parse_json(call.body, call.limits)
    if fields.integer("topk_prompt_logprobs", 0):
        raise ServiceError("topk_prompt_logprobs is not supported; ask for prompt_logprobs")
    request = sampling_request(fields, call.limits, prompt_logprobs=fields.flag("prompt_logprobs", False))
    return _wait(call, call.service.sample(sampler, request))


def logprobs(call: Call) -> Reply | Wait:
    """Compute the log-probs of a prompt."""
    sampler = call.own(call.path["sampler"])
    fields = parse_json(call.body, call.limits)
    found = [fields, *rows_of(fields, call.limits, call.limits.samples - 1)]
    prompts = [tokens_of_json(each.part("prompt"), call.limits) for each in found]
    if sum(map(len, prompts)) > call.limits.tokens:
        raise ServiceError(f"the prompts have more than {call.limits.tokens} tokens", code="too_large")
    return _wait(call, call.service.prompt_logprobs(sampler, *prompts))


def get_operation(call: Call) -> Wait:
    """Tell the state of an operation, when it has ended or after a while."""
    return Wait(call.operation(call.path["operation"]).id, call.limits.poll_seconds, state_reply)


def _pass(call: Call, name: str, *, forward_only: bool) -> Reply | Wait:
    if call.headers.get("content-type", "").startswith("multipart/"):
        raise ServiceError(
            "the tensor transport http-binary is not supported; leave WEAVER_TENSOR_TRANSPORT at its default",
            code="unsupported_media_type",
        )
    payload = _payload(call)

    def submit(model_id: str, seq_id: int | None) -> Operation:
        transport = payload.text("tensor_transport", "default")
        if transport != "default":
            payload.refuse("tensor_transport", "must be default", transport)
        request = pass_of(payload.part(name), call.limits, forward_only=forward_only)
        return call.service.run_pass(model_id, seq_id, request)

    return _numbered(call, payload, submit)


def _numbered(call: Call, fields: Fields, submit: Callable[[str, int | None], Operation]) -> Reply | Wait:
    """Submit a request of a model; a refused one spends its number, too, as the client does not use it again."""
    model_id = call.own(call.path["model"])
    seq_id = fields.integer("seq_id", None, low=1)
    named = fields.text("model_id", model_id)
    if named != model_id:
        fields.refuse("model_id", "must be the model of the path", named)
    operation, error = spending(
        call.service, model_id, seq_id, lambda: submit(model_id, seq_id), fields.problem
    )
    if error is not None:
        return error_reply(error)
    assert operation is not None
    return _wait(call, operation)


def _wait(call: Call, operation: Operation) -> Wait:
    return Wait(operation.id, call.limits.answer_seconds, accepted_reply)


def _payload(call: Call) -> Fields:
    return parse_json(call.body, call.limits, numbered=True).part("payload")  # type: ignore[no-any-return]  # checked by its kind


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
