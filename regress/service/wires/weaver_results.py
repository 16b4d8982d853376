"""Weaver's replies about operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from regress.service.service_api import (
    ModelInfo,
    Operation,
    OptimResult,
    PassResult,
    SamplingResult,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)
from regress.service.wires.save_names import Addresses
from regress.service.wires.wire_protocol import (
    Reply,
    Show,
    completions,
    error_reply,
    json_reply,
    numbers,
    shown_result,
)

KINDS = {
    "weight": SaveKind.WEIGHTS,
    "weight_and_optimizer": SaveKind.STATE,
    "sampling": SaveKind.SAMPLER,
}
_TYPES = {kind: name for name, kind in KINDS.items()}
ADDRESSES = Addresses(
    "weaver", {SaveKind.STATE: "checkpoints", SaveKind.WEIGHTS: "weights", SaveKind.SAMPLER: "sampler"}
)


def created_reply(operation: Operation) -> Reply:
    """Return the reply about the creation of a model."""
    if operation.status is Status.FAILED:
        assert operation.error is not None
        return error_reply(operation.error)
    if operation.status is not Status.DONE:
        raise ServiceError(
            "the model is still being created; ask again", code="busy", category="server", retryable=True
        )
    return json_reply(_model(operation.result), 201)


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.model_id,
        "base_model": info.base_model,
        "tokenizer_path": info.tokenizer,
        "debug_info": {"fingerprint": dict(info.fingerprint), "step": info.step},
    }


def accepted_reply(operation: Operation) -> Reply:
    """Answer a POST; SDKs before 1.19 take a failed operation there for a result, and hear of it when they poll."""
    if operation.status is Status.FAILED:
        return json_reply({"id": operation.id, "status": "pending"})
    return state_reply(operation)


def state_reply(operation: Operation) -> Reply:
    """Return the reply about an operation that is asked for."""
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
        content["response"] = shown_result(operation.result, _RESULTS)
    return json_reply(content)


def _outputs(result: PassResult) -> list[dict[str, Any]]:
    ids = result.datum_ids or [None] * len(result.outputs)
    found = []
    for output, datum_id in zip(result.outputs, ids, strict=True):
        shown: dict[str, Any] = {
            name: {"data": numbers(array), "dtype": "float32"} for name, array in output.items()
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


def shown_save(saved: Saved) -> dict[str, Any]:
    """Return a save as JSON."""
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


def _samples(result: SamplingResult) -> dict[str, Any]:
    return {"result": {**completions(result, texts=True), "step": result.step, "seed": result.seed}}


_RESULTS: dict[type, Show] = {
    PassResult: lambda result: {"result": {"loss_fn_outputs": _outputs(result), "metrics": _metrics(result)}},
    ModelInfo: _model,
    OptimResult: lambda result: {"metrics": result.metrics, "step": result.step},
    Saved: shown_save,
    SamplingResult: _samples,
    np.ndarray: lambda result: {"result": {"prompt_logprobs": numbers(result)}},
}
