"""Weaver's protocol: JSON, as the SDK ``nex-weaver`` 1.4 and later speaks it.

A request with a body is a message, which reads it and answers it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from regress.service.service_api import (
    AdamParams,
    ModelSpec,
    Operation,
    SaveKind,
    ServiceError,
)
from regress.service.wires.json_message import (
    Body,
    Count,
    LongText,
    Message,
    Positive,
    Request,
    Text,
    at_most,
    parse_json,
    refused,
)
from regress.service.wires.save_names import save_name
from regress.service.wires.shared_messages import Adam, Lora, OpenSampler, Pass, Prompt, Sampling, metadata_of
from regress.service.wires.weaver_results import (
    ADDRESSES,
    KINDS,
    accepted_reply,
    created_reply,
    shown_save,
    state_reply,
)
from regress.service.wires.wire_protocol import (
    Call,
    Reply,
    Route,
    Wait,
    Wire,
    batch_limits,
    error_reply,
    json_reply,
    spending,
)

_CREATE_SECONDS = 50.0
_ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=1e-2, grad_clip_norm=1.0)
"""Settings of a step that are left out, as the SDK has them."""


class CreateSession(Request):
    """Open a session of the API key's owner."""

    sdk_version: Any = None
    name: Any = None
    tags: Any = None
    user_metadata: Any = None
    labels: Any = None

    def _answer(self, call: Call) -> Reply:
        metadata = metadata_of(self, call, *CreateSession.model_fields)
        return json_reply({"id": call.service.create_session(metadata)}, 201)


def get_session(call: Call) -> Reply:
    """Confirm that a session exists."""
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


class CreateModel(Request):
    """Create a model, and answer when it is there."""

    model_seq_id: Count
    base_model: Text
    training_mode: Literal["lora", "full_ft"] | None = None
    lora_config: Lora | None = None
    user_metadata: Any = None
    name: Any = None

    def _answer(self, call: Call) -> Wait:
        session, lora = call.own(call.path["session"]), None
        if self.training_mode != "full_ft" and self.lora_config is not None:
            lora = self.lora_config.spec(rank=None, train_unembed=False)
        if self.training_mode == "lora" and lora is None:
            raise ServiceError(
                "training_mode is lora, but lora_config.rank is 0 or missing; send a rank, or full_ft"
            )
        spec = ModelSpec(self.base_model, lora, metadata_of(self, call, "user_metadata", "name"))
        operation = call.service.create_model(session, self.model_seq_id, spec)
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


class Numbered(Message):
    """Request of the model in its path, in the order of its number if it has one.

    The number is read before the rest: a refused request spends it, too, as the client does not use it again.
    """

    where: ClassVar[str] = ""
    model_id: Text | None = None
    seq_id: Positive | None = None

    @classmethod
    def handle(cls, call: Call) -> Reply | Wait:
        """Submit the request that is the body of a call."""
        body = cls.body(call)
        model_id = call.own(call.path["model"])
        head = Numbered.of(body.values, call.limits, cls.where)
        if head.model_id not in (None, model_id):
            named = f"{cls.where}.model_id".removeprefix(".")
            raise refused(named, "must be the model of the path", head.model_id)

        def submit() -> Operation:
            return cls.of(body.values, call.limits, cls.where)._submit(call, model_id)

        operation, error = spending(call.service, model_id, head.seq_id, submit, body.problem)
        if error is not None:
            return error_reply(error)
        assert operation is not None
        return _wait(call, operation)

    @classmethod
    def body(cls, call: Call) -> Body:
        """Return the object that the message is."""
        return parse_json(call.body, call.limits, numbered=True)

    def _submit(self, call: Call, model_id: str) -> Operation:
        raise NotImplementedError


class Wrapped(Message):
    """Body of a request that lies in its ``payload``."""

    payload: dict[str, Any]


class Payload(Numbered):
    """Request that lies in the ``payload`` of a body."""

    where: ClassVar[str] = "payload"

    @classmethod
    def body(cls, call: Call) -> Body:
        """Return the payload."""
        body = parse_json(call.body, call.limits, numbered=True)
        return Body(Wrapped.of(body.values, call.limits).payload, body.problem)


class PassPayload(Payload):
    """Pass whose tensors are in JSON."""

    tensor_transport: Literal["default"] = "default"

    @classmethod
    def body(cls, call: Call) -> Body:
        """Return the payload."""
        if call.headers.get("content-type", "").startswith("multipart/"):
            raise ServiceError(
                "the tensor transport http-binary is not supported; leave WEAVER_TENSOR_TRANSPORT at its default",
                code="unsupported_media_type",
            )
        return super().body(call)


class ForwardBackward(PassPayload):
    """Run a forward and a backward pass."""

    forward_backward_input: Pass

    def _submit(self, call: Call, model_id: str) -> Operation:
        asked, where = self.forward_backward_input, "payload.forward_backward_input"
        return call.service.run_pass(
            model_id, self.seq_id, asked.request(where, call.limits, forward_only=False)
        )


class Forward(PassPayload):
    """Run a forward pass."""

    forward_input: Pass

    def _submit(self, call: Call, model_id: str) -> Operation:
        asked, where = self.forward_input, "payload.forward_input"
        return call.service.run_pass(
            model_id, self.seq_id, asked.request(where, call.limits, forward_only=True)
        )


class OptimizerStep(Payload):
    """Update a model with its gradients."""

    adam_params: Adam

    def _submit(self, call: Call, model_id: str) -> Operation:
        return call.service.optim_step(model_id, self.seq_id, self.adam_params.params(_ADAM))


class ExportSampler(Numbered):
    """Save weights for sampling."""

    path: Text | None = None

    def _submit(self, call: Call, model_id: str) -> Operation:
        return call.service.save(model_id, self.seq_id, save_name(self.path), SaveKind.SAMPLER)


class SaveCheckpoint(Request):
    """Save a model after everything that has been accepted so far."""

    type: Literal["weight", "weight_and_optimizer", "sampling"] = "weight"
    name: Text | None = None

    def _answer(self, call: Call) -> Wait:
        model_id, name = call.own(call.path["model"]), save_name(self.name)
        return _wait(call, call.service.save(model_id, None, name, KINDS[self.type]))


def list_checkpoints(call: Call) -> Reply:
    """List the saves of a model."""
    saves = call.service.saves(call.own(call.path["model"]))
    return json_reply({"items": [shown_save(saved) for saved in saves]})


class Load(Request):
    """Load a save after everything that has been accepted so far."""

    path: LongText
    include_optimizer: bool = False

    def _answer(self, call: Call) -> Wait:
        model_id, path = call.own(call.path["model"]), ADDRESSES.path(self.path, call)
        return _wait(call, call.service.load(model_id, None, path, optimizer=self.include_optimizer))


def terminate(call: Call) -> Reply:
    """Close a model."""
    call.service.close_model(call.own(call.path["model"]))
    return json_reply({"id": call.path["model"], "status": "terminated"})


class CreateSampler(OpenSampler, Request):
    """Open saved weights, or a base model, for sampling."""

    def _answer(self, call: Call) -> Reply:
        sampler = self.open(call, call.own(call.path["session"]), ADDRESSES)
        info = call.service.sampler_info(sampler)
        reply = {"id": sampler, "tokenizer_path": info.tokenizer, "base_model": info.base_model}
        return json_reply({**reply, "batch": batch_limits(call.limits)}, 201)


class Sample(Sampling, Request):
    """Sample completions."""

    topk_prompt_logprobs: Count = 0

    def _answer(self, call: Call) -> Wait:
        sampler = call.own(call.path["sampler"])
        if self.topk_prompt_logprobs:
            raise ServiceError("topk_prompt_logprobs is not supported; ask for prompt_logprobs")
        return _wait(call, call.service.sample(sampler, self.request(call.limits)))


class LogProbs(Prompt, Request):
    """Compute the log-probs of prompts."""

    rows: Annotated[list[Prompt], FailFast(), at_most("samples")] = Field(default_factory=list)

    def _answer(self, call: Call) -> Wait:
        sampler = call.own(call.path["sampler"])
        rows = [row.prompt.ids(f"rows[{index}].prompt") for index, row in enumerate(self.rows)]
        prompts = [self.prompt.ids("prompt"), *rows]
        if sum(map(len, prompts)) > call.limits.tokens:
            raise ServiceError(f"the prompts have more than {call.limits.tokens} tokens", code="too_large")
        return _wait(call, call.service.prompt_logprobs(sampler, *prompts))


def get_operation(call: Call) -> Wait:
    """Return the state of an operation, when it has ended or after a while."""
    return Wait(call.operation(call.path["operation"]).id, call.limits.poll_seconds, state_reply)


def _wait(call: Call, operation: Operation) -> Wait:
    return Wait(operation.id, call.limits.answer_seconds, accepted_reply)


WEAVER = Wire(
    name="weaver",
    key_header="x-weaver-api-key",
    busy=503,
    routes=(
        Route("POST", "/api/v1/sessions", CreateSession.handle),
        Route("GET", "/api/v1/sessions/{session}", get_session),
        Route("POST", "/api/v1/sessions/{session}/heartbeat", heartbeat, empty=True),
        Route("DELETE", "/api/v1/sessions/{session}", finish_session, empty=True),
        Route("POST", "/api/v1/sessions/{session}/models", CreateModel.handle),
        Route("GET", "/api/v1/supported-models", supported_models),
        Route("POST", "/api/v1/models/{model}/forward-backward-passes", ForwardBackward.handle),
        Route("POST", "/api/v1/models/{model}/forward-passes", Forward.handle),
        Route("POST", "/api/v1/models/{model}/optimizer-steps", OptimizerStep.handle),
        Route("POST", "/api/v1/models/{model}/export-sampler", ExportSampler.handle),
        Route("POST", "/api/v1/models/{model}/checkpoints", SaveCheckpoint.handle),
        Route("GET", "/api/v1/models/{model}/checkpoints", list_checkpoints),
        Route("POST", "/api/v1/models/{model}/load", Load.handle),
        Route("POST", "/api/v1/models/{model}/terminate", terminate, empty=True),
        Route("POST", "/api/v1/sessions/{session}/sampling-sessions", CreateSampler.handle),
        Route("POST", "/api/v1/sampling-sessions/{sampler}/samples", Sample.handle),
        Route("POST", "/api/v1/sampling-sessions/{sampler}/logprobs", LogProbs.handle),
        Route("GET", "/api/v1/operations/{operation}", get_operation),
    ),
)
