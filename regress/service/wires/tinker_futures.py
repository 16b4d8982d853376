"""Tinker's futures: questions about them, and the replies in JSON or protobuf, as the client accepts it."""

from __future__ import annotations

import re
from typing import Any

from regress.service.service_api import (
    Array,
    ModelInfo,
    Operation,
    OptimResult,
    PassResult,
    SamplingResult,
    Saved,
    SaveKind,
    Status,
)
from regress.service.wires import tinker_protobuf
from regress.service.wires.json_message import LongText, Request
from regress.service.wires.save_names import Addresses
from regress.service.wires.wire_protocol import (
    Call,
    Reply,
    Show,
    Wait,
    completions,
    json_reply,
    numbers,
    shown_result,
)

ADDRESSES = Addresses("tinker", {SaveKind.STATE: "weights", SaveKind.SAMPLER: "sampler_weights"})
_EPHEMERAL = re.compile(r"(?P<operation>[^~]+)~sampler~(?P<number>\d{1,10})")


class RetrieveFuture(Request):
    """Tell the result of a future, when it is there."""

    request_id: LongText

    def _answer(self, call: Call) -> Reply | Wait:
        if self.request_id.startswith("closed~"):
            model_id = call.own(self.request_id.removeprefix("closed~"))
            return json_reply({"type": "unload_model", "model_id": model_id})
        ephemeral = _EPHEMERAL.fullmatch(self.request_id)
        operation = call.operation(ephemeral["operation"] if ephemeral else self.request_id)
        binary = tinker_protobuf.MEDIA_TYPE in call.headers.get("accept", "")

        def then(found: Operation) -> Reply:
            if ephemeral and found.status is Status.DONE:
                return _ephemeral(call, found, int(ephemeral["number"]))
            return _future_reply(found, binary=binary)

        return Wait(operation.id, call.limits.poll_seconds, then)


class CancelFuture(Request):
    """Cancel a request that does not run yet."""

    request_id: LongText

    def _answer(self, call: Call) -> Reply:
        call.service.cancel(call.operation(self.request_id.partition("~")[0]).id)
        return json_reply({})


def _future_reply(operation: Operation, *, binary: bool) -> Reply:
    """Return the reply about a future; ``binary`` if the client reads protobuf."""
    if operation.status is Status.FAILED:
        assert operation.error is not None
        return json_reply({"error": str(operation.error), "category": operation.error.category})
    if operation.status is not Status.DONE:
        content = {"type": "try_again", "request_id": operation.id, "queue_state": "active"}
        return json_reply(content, 408)
    result = operation.result
    if binary and isinstance(result, PassResult):
        return Reply(tinker_protobuf.pass_output(result), media_type=tinker_protobuf.MEDIA_TYPE)
    if binary and isinstance(result, SamplingResult):
        return Reply(tinker_protobuf.samples(result), media_type=tinker_protobuf.MEDIA_TYPE)
    return json_reply(shown_result(result, _RESULTS))


def _pass_result(result: PassResult) -> dict[str, Any]:
    outputs = [{name: _tensor(array) for name, array in output.items()} for output in result.outputs]
    return {
        "loss_fn_output_type": tinker_protobuf.OUTPUT_TYPE,
        "loss_fn_outputs": outputs,
        "metrics": dict(result.metrics),
    }


def _tensor(array: Array) -> dict[str, Any]:
    return {"data": numbers(array), "dtype": "float32", "shape": list(array.shape)}


_RESULTS: dict[type, Show] = {
    PassResult: _pass_result,
    OptimResult: lambda result: {"type": "optim_step", "metrics": result.metrics},
    ModelInfo: lambda result: {
        "model_id": result.model_id
    },  # without a type: load_weights creates models, too
    Saved: lambda result: {"path": ADDRESSES.of(result), "model_id": result.model_id},
    SamplingResult: lambda result: {"type": "sample", **completions(result, texts=False)},
}


def shown_adapter(info: ModelInfo) -> dict[str, Any]:
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
