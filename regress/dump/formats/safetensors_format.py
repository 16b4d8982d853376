"""The safetensors format: 8 bytes of header length, a JSON header, the raw tensors.

Written and read here directly: no copy on writing, and a damaged file is judged by our own rules.
The record's head stands in the header's `__metadata__` under `regress`, its checksum under `sha256`.
Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np

from regress.dump.canonical_json import loads
from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import DTYPES, Array, dtype_name, raw
from regress.dump.record import Record, from_head, tensor_table

NAME = "safetensors"
HEADER = 100_000_000
"""Most bytes of a header, as for the readers of Hugging Face."""

_Tensor: TypeAlias = Callable[[memoryview, np.dtype[Any], tuple[int, ...]], Array]

CODES = {
    "bool": "BOOL",
    **{f"{kind}int{bits}": f"{kind or 'I'}{bits}".upper() for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Element types by the format's own names."""


def encode(record: Record) -> list[bytes | memoryview]:
    """Return the file as a list of buffers; tensors are not copied."""
    head, checksum = record.seal()
    header: dict[str, Any] = {"__metadata__": {"regress": head, "sha256": checksum}}
    # Widest elements first, so that each tensor is aligned: readers that map the file rely on it.
    arrays = sorted(record.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        code = CODES[dtype_name(array.dtype)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(raw(array) for _, array in arrays)]


def matches(data: bytes) -> bool:
    """Return True if `data` begins like a safetensors file: a length far below that of any text, then JSON."""
    return data[8:10] == b'{"' and data[7:8] < b" "


def decode(data: bytes) -> list[Record]:
    """Return the record of a file; raises `Damage` naming what is damaged."""
    record, checksum = _parse(memoryview(data), _copied)
    if record.checksum() != checksum:
        raise Damage("its content does not match its checksum")
    return [record]


def view(data: memoryview) -> Record:
    """Return the record of a file with tensors as parts of `data`; everything but the checksum is verified.

    Raises `Damage`, or a parser's own exception, for what does not fit.
    """
    return _parse(data, _viewed)[0]


def spans(data: memoryview, names: Collection[str]) -> list[tuple[int, int]]:
    """Return the bytes of a file that hold its description and some of its tensors; names that it lacks are left out.

    Raises `Damage`, or a parser's own exception, for what does not fit.
    """
    header, start = _header(data)
    found = [(0, start)]
    for name in names:
        match header.get(name):
            case {"data_offsets": [int(first), int(last)]} if 0 <= first <= last:
                found.append((start + first, start + last))
    return found


def _header(data: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its tensors begin."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise Damage(f"it announces a header of {size} bytes but ends after {len(data)} bytes")
    if size > HEADER:
        raise Damage(f"it announces a header of {size} bytes, and no header has more than {HEADER}")
    header = loads(bytes(data[8 : 8 + size]))
    if not isinstance(header, dict):
        raise Damage("its header is not a JSON object")
    return header, 8 + size


def _parse(data: memoryview, tensor: _Tensor) -> tuple[Record, Any]:
    """Return the record, and the checksum stated in its file."""
    header, start = _header(data)
    info = header.pop("__metadata__", None)
    if not isinstance(info, dict) or not isinstance(info.get("regress"), str):
        raise Damage("it holds tensors but no description of a record")
    head = loads(info["regress"])
    tensors = _tensors(header, tensor_table(head), data[start:], tensor)
    return from_head(head, tensors), info.get("sha256")


def _copied(part: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.frombuffer(part, dtype=dtype).reshape(shape).copy()


def _viewed(part: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.frombuffer(part, dtype=dtype).reshape(shape)


def _tensors(
    header: dict[str, Any],
    table: list[tuple[str, str, tuple[int, ...]]],
    body: memoryview,
    tensor: _Tensor,
) -> dict[str, Array]:
    if header.keys() != {name for name, _, _ in table}:
        raise Damage("its header names other tensors than its description")
    tensors = {}
    for name, dtype, shape in table:
        entry = header[name]
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if offsets is None or entry != {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": offsets,
        }:
            raise Damage(f"its header and its description differ about the tensor {name!r}")
        tensors[name] = tensor(_part(body, offsets, DTYPES[dtype], shape, name), DTYPES[dtype], shape)
    if sum(array.nbytes for array in tensors.values()) != len(body):
        raise Damage("it holds more or fewer bytes than its tensors need")
    return tensors


def _part(
    body: memoryview, offsets: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> memoryview:
    match offsets:
        case [int(start), int(end)] if 0 <= start <= end <= len(body):
            size = 1
            for extent in shape:
                size *= extent
            if size * dtype.itemsize == end - start:
                return body[start:end]
    raise Damage(f"it ends after {len(body)} bytes of tensors, before or within the tensor {name!r}")
