"""Tinker's protobuf messages: forward and backward passes, and samples.

The descriptors are our own, in a pool of their own; on the wire only the numbers of the fields matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from regress.service.service_api import Array, Datum, PassRequest, PassResult, SamplingResult, ServiceError
from regress.service.wires.app_settings import Limits
from regress.service.wires.request_arrays import (
    DTYPES,
    TARGETS,
    check_count,
    check_total,
    datum_of,
    from_bytes,
    from_rows,
    tokens_of,
)
from regress.service.wires.wire_protocol import shown_name

MEDIA_TYPE = "application/x-protobuf"
OUTPUT_TYPE = "TorchLossReturn"

_PACKAGE = "regress_service_wire"
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: DTYPES["float32"], _INT64: DTYPES["int64"], 3: DTYPES["int32"]}

# message: fields as number, name, type; "rep", "map<...>" and "one" (of a oneof) go before the type
_MESSAGES: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "Chunk": [(1, "text", "one Text"), (2, "image", "one bytes"), (3, "dmel", "one bytes")],
    "Text": [(1, "tokens", "bytes")],
    "Rows": [(1, "values", "bytes"), (2, "starts", "bytes"), (3, "columns", "bytes")],
    "Tensor": [(1, "dense", "one bytes"), (2, "rows", "one Rows"), (3, "dtype", "int32"), (4, "shape", "rep int64")],
    "Datum": [(1, "model_input", "rep Chunk"), (2, "loss_fn_inputs", "map Tensor")],
    "Value": [(1, "number", "one double"), (2, "text", "one string")],
    "PassRequest": [
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "rep Datum"),
        (4, "loss_fn", "string"),
        (5, "numbers", "map double"),
        (6, "forward_only", "bool"),
        (7, "values", "map Value"),
    ],
    "PassOutput": [(1, "type", "string"), (2, "records", "rep Record"), (3, "metrics", "map double")],
    "Record": [(1, "tag", "string"), (2, "fields", "map Batched"), (3, "data", "int64")],
    "Batched": [(1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"), (4, "trailing", "rep int64")],
    "Sampled": [(1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "opt bytes")],
    "Samples": [(1, "sequences", "rep Sampled"), (2, "prompt_logprobs", "opt bytes")],
}  # fmt: skip
_SCALARS = {"bytes": 12, "string": 9, "double": 1, "int32": 5, "int64": 3, "bool": 8}


def _build() -> dict[str, Any]:
    """Return the classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add(described, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _add(described: Any, number: int, name: str, kind: str) -> None:
    way, _, kind = kind.rpartition(" ")
    field = described.field.add(name=name, number=number, label=3 if way in ("rep", "map") else 1)
    if way == "map":
        entry = described.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _type(entry.field.add(name="key", number=1, label=1), "string")
        _type(entry.field.add(name="value", number=2, label=1), kind)
        field.type, field.type_name = 11, f".{_PACKAGE}.{described.name}.{entry.name}"
        return
    _type(field, kind)
    if way == "one":
        if not described.oneof_decl:
            described.oneof_decl.add(name="kind")
        field.oneof_index = 0
    if way == "opt":
        field.proto3_optional = True
        field.oneof_index = len(described.oneof_decl)
        described.oneof_decl.add(name=f"_{name}")


def _type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = 11, f".{_PACKAGE}.{kind}"


_CLASSES = _build()


def message_class(name: str) -> Any:
    """Return the class of a message, such as ``PassRequest``, ``PassOutput`` and ``Samples``."""
    return _CLASSES[name]


def parse_pass(body: bytes) -> Any:
    """Return the message of a pass.

    Raises:
        ServiceError: the bytes are not such a message.
    """
    try:
        return _CLASSES["PassRequest"].FromString(body)
    except (message.DecodeError, ValueError):  # the second: texts that are not UTF-8
        raise ServiceError("the body is not valid protobuf message of a pass; send it whole") from None


def pass_request(found: Any, limits: Limits) -> PassRequest:
    """Return the request of a parsed message.

    Raises:
        ServiceError: its content is refused.
    """
    if len(found.data) > limits.data:
        raise ServiceError(f"data has {len(found.data)} datums, more than {limits.data}", code="too_large")
    data = [_datum(datum, f"data[{index}]", limits) for index, datum in enumerate(found.data)]
    check_total(data, limits)
    widths = {datum.inputs[TARGETS].shape[1:] for datum in data if TARGETS in datum.inputs}
    if len(widths) > 1:  # the reply has one width for all of them
        raise ServiceError(
            "target_tokens of the datums differ in the targets of a token; send one request for each width"
        )
    config: dict[str, float | str | bool] = dict(found.numbers.items())
    for name, value in found.values.items():
        config[name] = value.text if value.WhichOneof("kind") == "text" else value.number
    for name, setting in config.items():
        if isinstance(setting, float) and not np.isfinite(setting):
            raise ServiceError(f"loss_fn_config.{shown_name(name)} is {setting}; send a finite number")
    return PassRequest(data, found.loss_fn, config, found.forward_only)


def pass_output(result: PassResult) -> bytes:
    """Return the message of a pass's result; every field of an output is one batch over all datums."""
    found = _CLASSES["PassOutput"](type=OUTPUT_TYPE)
    record = found.records.add(tag=OUTPUT_TYPE, data=len(result.outputs))
    for name in sorted(result.outputs[0]) if result.outputs else ():
        arrays = [output[name].astype("<f4") for output in result.outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        batched = record.fields[name]
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = offsets.tobytes()
        batched.dtype = _FLOAT32
        batched.trailing.extend(arrays[0].shape[1:])
    for name, value in result.metrics.items():
        found.metrics[name] = value
    return found.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def samples(result: SamplingResult) -> bytes:
    """Return the message of sampled completions."""
    found = _CLASSES["Samples"]()
    for sequence in result.sequences:
        found.sequences.add(
            stop_reason=0 if sequence.stop_reason == "stop" else 1,
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        found.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    return found.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def _datum(datum: Any, where: str, limits: Limits) -> Datum:
    pieces = []
    for index, chunk in enumerate(datum.model_input):
        name = f"{where}.model_input[{index}]"
        if chunk.WhichOneof("kind") != "text":
            raise ServiceError(f"{name} is not text; chunks of encoded text alone are supported")
        pieces.append(_flat(chunk.text.tokens, DTYPES["int32"], f"{name}.tokens"))
    tokens = tokens_of(pieces, f"{where}.model_input")
    check_count(len(datum.loss_fn_inputs), where, limits)
    inputs = {
        name: _tensor(tensor, f"{where}.loss_fn_inputs.{shown_name(name)}", limits)
        for name, tensor in sorted(datum.loss_fn_inputs.items())
    }
    return datum_of(tokens, inputs, where, several=True)


def _tensor(tensor: Any, where: str, limits: Limits) -> Array:
    if tensor.dtype not in _DTYPES:
        raise ServiceError(f"{where} has the dtype number {tensor.dtype}; send float32, int64 or int32")
    dtype = _DTYPES[tensor.dtype]
    kind = tensor.WhichOneof("kind")
    if kind == "rows":
        rows = tensor.rows
        return from_rows(
            _flat(rows.values, dtype, where),
            _flat(rows.starts, DTYPES["int64"], f"{where}.crow_indices"),
            _flat(rows.columns, DTYPES["int64"], f"{where}.col_indices"),
            tensor.shape,
            where,
            limits,
        )
    shape = tensor.shape or [len(tensor.dense) // dtype.itemsize]
    return from_bytes(tensor.dense, dtype, shape, where, limits)


def _flat(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise ServiceError(f"{where} has {len(data)} bytes, which are no {dtype} numbers")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
