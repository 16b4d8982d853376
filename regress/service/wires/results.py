"""Results as JSON, as far as the protocols agree on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regress.service.api import Array, SamplingResult, ServiceError

Show = Callable[[Any], Mapping[str, Any]]
"""Function that returns a result of one type as JSON."""


def shown_result(result: object, shows: Mapping[type, Show]) -> Mapping[str, Any]:
    """Return the result of an operation as JSON.

    Args:
        shows: how a protocol shows each type of result.

    Raises:
        ServiceError: only another protocol asks for such an operation.
    """
    for kind, show in shows.items():
        if isinstance(result, kind):
            return show(result)
    raise ServiceError(
        "the result of this operation has no form in this protocol; ask by the one that started it"
    )


def numbers(array: Array) -> list[float | None]:
    """Return numbers as float32, row after row, and None for those that JSON has not."""
    rounded = array.astype(np.float32).ravel()
    if np.isfinite(rounded).all():
        return [*rounded.tolist()]
    return [float(value) if np.isfinite(value) else None for value in rounded]


def completions(result: SamplingResult, *, texts: bool) -> dict[str, Any]:
    """Return sampled completions, with their texts if the protocol has them."""
    sequences = []
    for sequence in result.sequences:
        shown: dict[str, Any] = {
            "tokens": sequence.tokens.tolist(),
            "logprobs": numbers(sequence.logprobs),
            "stop_reason": sequence.stop_reason,
        }
        sequences.append({**shown, "text": sequence.text} if texts else shown)
    found: dict[str, Any] = {"sequences": sequences}
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = numbers(result.prompt_logprobs)
    return found
