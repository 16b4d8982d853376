"""Protobuf messages of Tinker's passes and samples, as a client writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regress.service.api import Array, Datum, PassResult, SampledSequence, SamplingResult
from regress.service.wires.protobuf import message_class

DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}


def pass_message(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Array, Mapping[str, Array]]],
    loss: str,
    config: Mapping[str, float],
    *,
    forward_only: bool,
) -> bytes:
    """Return the message of a pass over tokens and the arrays of their loss."""
    found = message_class("PassRequest")(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = found.data.add()
        datum.model_input.add().text.tokens = tokens.astype("<i4").tobytes()
        for name, values in inputs.items():
            number = 2 if values.dtype.kind == "i" else 1
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.astype(DTYPES[number]).tobytes(), number
            tensor.shape.append(len(values))
    for name, value in config.items():
        found.numbers[name] = value
        found.values[name].number = value
    return found.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def pass_result(body: bytes, data: Sequence[Datum]) -> PassResult:
    """Return the result of a pass over these datums."""
    found = message_class("PassOutput").FromString(body)
    outputs: list[dict[str, Array]] = []
    for record in found.records:
        rows: list[dict[str, Array]] = [{} for _ in range(record.data)]
        for name, batched in record.fields.items():
            offsets = np.frombuffer(batched.offsets, "<i8")
            for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
                row[name] = np.frombuffer(batched.data[start:stop], DTYPES.get(batched.dtype, "<f4")).copy()
        outputs += rows
    return PassResult(outputs, dict(found.metrics), [datum.id for datum in data])


def sampling_result(body: bytes, seed: int) -> SamplingResult:
    """Return completions."""
    found: Any = message_class("Samples").FromString(body)
    sequences = [
        SampledSequence(
            np.frombuffer(one.tokens, "<i4").astype(np.int64),
            np.frombuffer(one.logprobs, "<f4").copy(),
            "",
            "length" if one.stop_reason == 1 else "stop",
        )
        for one in found.sequences
    ]
    prompt = np.frombuffer(found.prompt_logprobs, "<f4").copy() if found.HasField("prompt_logprobs") else None
    return SamplingResult(sequences, prompt, -1, seed)
