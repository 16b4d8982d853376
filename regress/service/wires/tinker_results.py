"""Tinker's replies about futures: JSON or protobuf, as the client accepts it."""

from __future__ import annotations

from typing import Any

from regress.service.api import (
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
from regress.service.wires import protobuf
from regress.service.wires.names import Addresses
from regress.service.wires.wire import Reply, Show, completions, json_reply, numbers, shown_result

ADDRESSES = Addresses("tinker", {SaveKind.STATE: "weights", SaveKind.SAMPLER: "sampler_weights"})


def future_reply(operation: Operation, *, binary: bool) -> Reply:
    """Return the reply about a future; ``binary`` if the client reads protobuf."""
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
    return json_reply(shown_result(result, _RESULTS))


def _pass_result(result: PassResult) -> dict[str, Any]:
    outputs = [{name: _tensor(array) for name, array in output.items()} for output in result.outputs]
    return {
        "loss_fn_output_type": protobuf.OUTPUT_TYPE,
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
