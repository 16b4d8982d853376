"""Values of the service as JSON, for its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from regress.service.api import (
    AdamParams,
    LoraSpec,
    ModelInfo,
    ModelSpec,
    OptimResult,
    Saved,
    SaveKind,
    ServiceError,
)


def packed_error(error: ServiceError) -> dict[str, Any]:
    """Return an error as JSON."""
    return {
        "message": str(error),
        "code": error.code,
        "category": error.category,
        "retryable": error.retryable,
    }


def unpacked_error(packed: Mapping[str, Any]) -> ServiceError:
    """Return the error of `packed_error`."""
    return ServiceError(
        packed["message"], code=packed["code"], category=packed["category"], retryable=packed["retryable"]
    )


def packed_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return a model's specification as JSON."""
    return {**asdict(spec), "metadata": dict(spec.metadata)}


def unpacked_spec(packed: Mapping[str, Any]) -> ModelSpec:
    """Return the specification of `packed_spec`."""
    return ModelSpec(packed["base_model"], _lora(packed["lora"]), packed["metadata"])


def packed_result(result: object) -> dict[str, Any] | None:
    """Return a small result as JSON, None for one that is too large to be kept in a journal."""
    if isinstance(result, ModelInfo):
        return {"type": "model", **asdict(result), "fingerprint": dict(result.fingerprint)}
    if isinstance(result, OptimResult):
        return {"type": "optim", **asdict(result)}
    if isinstance(result, Saved):
        return {"type": "saved", **asdict(result), "kind": result.kind.value}
    return None


def unpacked_result(packed: Mapping[str, Any]) -> ModelInfo | OptimResult | Saved:
    """Return the result of `packed_result`."""
    values = {name: value for name, value in packed.items() if name != "type"}
    if packed["type"] == "model":
        return ModelInfo(**{**values, "lora": _lora(values["lora"])})
    if packed["type"] == "optim":
        return OptimResult(**{**values, "params": AdamParams(**values["params"])})
    return Saved(**{**values, "kind": SaveKind(values["kind"])})


def _lora(packed: Mapping[str, Any] | None) -> LoraSpec | None:
    return None if packed is None else LoraSpec(**packed)
