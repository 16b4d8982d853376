"""Tinker's protocol: JSON and protobuf, as the SDK ``tinker`` 0.18 and later speaks it.

A request with a body is a message, which reads it and answers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from regress.service.service_api import (
    AdamParams,
    ModelSpec,
    Operation,
    SaveKind,
    ServiceError,
)
from regress.service.wires import tinker_protobuf
from regress.service.wires.json_message import Count, LongText, Message, Positive, Request, Text, parse_json
from regress.service.wires.save_names import save_name
from regress.service.wires.shared_messages import Adam, Lora, OpenSampler, Pass, Sampling, metadata_of
from regress.service.wires.tinker_futures import ADDRESSES, CancelFuture, RetrieveFuture, shown_adapter
from regress.service.wires.wire_protocol import (
    Call,
    Reply,
    Route,
    Wait,
    Wire,
    batch_limits,
    json_reply,
    spending,
)

_ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
"""Settings of a step; SDKs up to 0.14 leave out those at their defaults."""
_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "target_prompt_logprobs",
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


class CreateSession(Request):
    """Open a session of the API key's owner."""

    tags: Any = None
    user_metadata: Any = None
    sdk_version: Any = None
    project_id: Any = None
    display_name: Any = None

    def _answer(self, call: Call) -> Reply:
        key = call.headers.get("x-idempotency-key")
        owned = f"{call.owner} {key}" if key else None
        session = call.service.create_session(metadata_of(self, call, *CreateSession.model_fields), key=owned)
        return json_reply({"type": "create_session", "session_id": session})


class Heartbeat(Request):
    """Keep a session alive."""

    session_id: Text

    def _answer(self, call: Call) -> Reply:
        call.service.touch_session(call.own(self.session_id))
        return json_reply({"type": "session_heartbeat"})


def finish_session(call: Call) -> Reply:
    """End a session."""
    call.service.finish_session(call.own(call.path["session"]))
    return Reply(b"", 204)


class OptimizerConfig(Message):
    """Optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Request):
    """Create a model; a LoRA rank of 0 means full parameters."""

    session_id: Text
    model_seq_id: Count
    base_model: Text
    optimizer_config: OptimizerConfig = OptimizerConfig()
    lora_config: Lora = Lora()
    user_metadata: Any = None

    def _answer(self, call: Call) -> Reply:
        session = call.own(self.session_id)
        lora = self.lora_config.spec(rank=32, train_unembed=True)
        spec = ModelSpec(self.base_model, lora, metadata_of(self, call, "user_metadata"))
        return _future(call.service.create_model(session, self.model_seq_id, spec))


class GetInfo(Request):
    """Return the facts about a model."""

    model_id: Text

    def _answer(self, call: Call) -> Reply:
        info = call.service.model_info(call.own(self.model_id))
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


class WeightsInfo(Request):
    """Tell of what model a save is."""

    tinker_path: LongText

    def _answer(self, call: Call) -> Reply:
        info = call.service.model_info(ADDRESSES.path(self.tinker_path, call).rsplit("/", 2)[0])
        rank = info.lora.rank if info.lora else 0
        return json_reply({"base_model": info.base_model, **shown_adapter(info), "lora_rank": rank})


class Numbered(Message):
    """Request of a model, in the order of its number, which is read first: a refused request spends it, too."""

    model_id: Text
    seq_id: Positive

    @classmethod
    def handle(cls, call: Call) -> Reply:
        """Answer the future of the request that is the body of a call."""
        body = parse_json(call.body, call.limits, numbered=True)
        head = Numbered.of(body.values, call.limits)

        def submit() -> Operation:
            return cls.of(body.values, call.limits)._submit(call)

        return _numbered(call, head.model_id, head.seq_id, submit, body.problem)

    def _submit(self, call: Call) -> Operation:
        raise NotImplementedError

    def _run(self, call: Call, asked: Pass, where: str, *, forward_only: bool) -> Operation:
        request = asked.request(where, call.limits, forward_only=forward_only, several=True)
        return call.service.run_pass(self.model_id, self.seq_id, request)


class ForwardBackward(Numbered):
    """Run a forward and a backward pass."""

    forward_backward_input: Pass

    def _submit(self, call: Call) -> Operation:
        return self._run(call, self.forward_backward_input, "forward_backward_input", forward_only=False)


class Forward(Numbered):
    """Run a forward pass, as SDKs before 0.25 ask for it."""

    forward_input: Pass

    def _submit(self, call: Call) -> Operation:
        return self._run(call, self.forward_input, "forward_input", forward_only=True)


def forward_backward(call: Call) -> Reply:
    """Run a pass, forward and backward, or forward alone as a message in protobuf says."""
    if call.headers.get("content-type", "").partition(";")[0].strip() != tinker_protobuf.MEDIA_TYPE:
        return ForwardBackward.handle(call)
    found = tinker_protobuf.parse_pass(call.body)

    def submit() -> Operation:
        return call.service.run_pass(
            found.model_id, found.seq_id, tinker_protobuf.pass_request(found, call.limits)
        )

    return _numbered(call, found.model_id, found.seq_id, submit)


class OptimStep(Numbered):
    """Update a model with its gradients."""

    adam_params: Adam = Adam()
    optimizer_params: Any = None

    def _submit(self, call: Call) -> Operation:
        if self.optimizer_params is not None:
            raise ServiceError("optimizer_params are not supported; send adam_params")
        return call.service.optim_step(self.model_id, self.seq_id, self.adam_params.params(_ADAM))


class SaveWeights(Numbered):
    """Save weights and optimizer."""

    path: Text | None = None
    overwrite: bool = False

    def _submit(self, call: Call) -> Operation:
        return self._save(call, self.path, SaveKind.STATE)

    def _save(self, call: Call, name: str | None, kind: SaveKind) -> Operation:
        return call.service.save(self.model_id, self.seq_id, save_name(name), kind, overwrite=self.overwrite)


class SaveForSampler(SaveWeights):
    """Save weights for sampling, under a name or for a sampler that is opened at once."""

    kind: Literal["snapshot"] = "snapshot"
    sampling_session_seq_id: Count | None = None

    def _submit(self, call: Call) -> Operation:
        if self.sampling_session_seq_id is None:
            return self._save(call, self.path, SaveKind.SAMPLER)
        saved = self._save(call, None, SaveKind.SAMPLER)
        return replace(saved, id=f"{saved.id}~sampler~{self.sampling_session_seq_id}")


class LoadWeights(Numbered):
    """Load a save into a model."""

    path: LongText
    optimizer: bool = False

    def _submit(self, call: Call) -> Operation:
        path = ADDRESSES.path(self.path, call)
        return call.service.load(self.model_id, self.seq_id, path, optimizer=self.optimizer)


class CreateModelFrom(Request):
    """Create a model of a save."""

    session_id: Text
    model_seq_id: Count
    path: LongText
    optimizer: bool = False

    def _answer(self, call: Call) -> Reply:
        session, path = call.own(self.session_id), ADDRESSES.path(self.path, call)
        return _future(
            call.service.create_model_from(session, self.model_seq_id, path, optimizer=self.optimizer)
        )


def load_weights(call: Call) -> Reply | Wait:
    """Load a save into a model, or create a model of it."""
    of_model = parse_json(call.body, call.limits, numbered=True).values.get("model_id") is not None
    return LoadWeights.handle(call) if of_model else CreateModelFrom.handle(call)


class UnloadModel(Request):
    """Close a model."""

    model_id: Text

    def _answer(self, call: Call) -> Reply:
        model_id = call.own(self.model_id)
        call.service.close_model(model_id)
        return json_reply({"request_id": f"closed~{model_id}", "model_id": model_id})


class CreateSampler(OpenSampler, Request):
    """Open saved weights, or a base model, for sampling."""

    session_id: Text

    def _answer(self, call: Call) -> Reply:
        sampler = self.open(call, call.own(self.session_id), ADDRESSES)
        reply = {"type": "create_sampling_session", "sampling_session_id": sampler}
        return json_reply({**reply, "batch": batch_limits(call.limits)})


def get_sampler(call: Call) -> Reply:
    """Return the facts about a sampler."""
    info = call.service.sampler_info(call.own(call.path["sampler"]))
    content = {"sampler_id": info.sampler_id, "base_model": info.base_model}
    return json_reply(content | ({"model_path": ADDRESSES.of_path(info.path)} if info.path else {}))


class Sample(Sampling, Request):
    """Sample completions; the same number of the same sampler again is the same operation."""

    sampling_session_id: Text
    seq_id: Count | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Count = 0
    target_prompt_logprobs: Any = None

    def _answer(self, call: Call) -> Reply:
        sampler = call.own(self.sampling_session_id)
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise ServiceError(f"{name} is not supported; ask for prompt_logprobs")
        request = self.request(call.limits)
        found = call.service.sample(sampler, request, number=self.seq_id).id
        ids = [f"{found}~{index}" for index in range(request.count + len(request.rows))]
        return json_reply({"request_id": found, "sample_sequence_ids": ids})


def telemetry(call: Call) -> Reply:
    """Accept what the client tells about itself, and drop it."""
    return json_reply({"status": "accepted"})


def _numbered(
    call: Call,
    model_id: str,
    seq_id: int,
    submit: Callable[[], Operation],
    problem: ServiceError | None = None,
) -> Reply:
    """Answer a future for a numbered request, whatever its content: a 4xx would leave a hole in the numbers."""
    if seq_id < 1:
        raise ServiceError("seq_id is missing; number the requests of a model from 1")
    call.own(model_id)
    operation, _ = spending(call.service, model_id, seq_id, submit, problem)
    assert operation is not None
    return _future(operation)


def _future(operation: Operation) -> Reply:
    model = {"model_id": operation.model_id} if operation.model_id else {}
    return json_reply({"request_id": operation.id, **model})


TINKER = Wire(
    name="tinker",
    key_header="x-api-key",
    busy=429,
    routes=(
        Route("POST", "/api/v1/client/config", client_config),
        Route("POST", "/api/v1/client/dynamic_config", client_config),
        Route("GET", "/api/v1/get_server_capabilities", capabilities),
        Route("POST", "/api/v1/create_session", CreateSession.handle),
        Route("POST", "/api/v1/session_heartbeat", Heartbeat.handle),
        Route("POST", "/api/v1/sessions/{session}/finish", finish_session),
        Route("POST", "/api/v1/create_model", CreateModel.handle),
        Route("POST", "/api/v1/get_info", GetInfo.handle),
        Route("POST", "/api/v1/weights_info", WeightsInfo.handle),
        Route("POST", "/api/v1/unload_model", UnloadModel.handle),
        Route("POST", "/api/v1/forward_backward", forward_backward),
        Route("POST", "/api/v1/forward", Forward.handle),
        Route("POST", "/api/v1/optim_step", OptimStep.handle),
        Route("POST", "/api/v1/save_weights", SaveWeights.handle),
        Route("POST", "/api/v1/save_weights_for_sampler", SaveForSampler.handle),
        Route("POST", "/api/v1/load_weights", load_weights),
        Route("POST", "/api/v1/create_sampling_session", CreateSampler.handle),
        Route("GET", "/api/v1/samplers/{sampler}", get_sampler),
        Route("POST", "/api/v1/asample", Sample.handle),
        Route("POST", "/api/v1/retrieve_future", RetrieveFuture.handle),
        Route("POST", "/api/v1/cancel_future", CancelFuture.handle),
        Route("POST", "/api/v1/telemetry", telemetry),
    ),
)
