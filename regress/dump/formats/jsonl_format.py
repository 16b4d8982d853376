"""The jsonl format: one line of strict JSON per record, under the keys of `regress.dump.record_payload`.

A tensor is `{"dtype", "shape", "data"}` with flat data; floats are written as the shortest decimal of their
exact value and non-finite ones as "NaN", "Infinity", "-Infinity". The last member of a line, `sha256`, covers
the text before it.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np

from regress.dump.canonical_json import float_name, loads, nonfinite, tag_floats
from regress.dump.file_damage import Damage
from regress.dump.nexrl_files import read_foreign
from regress.dump.numpy_arrays import DTYPES, Array, canonical_nans, dtype_name, is_float
from regress.dump.record import Record, replace_tensors
from regress.dump.record_payload import from_payload, to_payload
from regress.errors import DumpError
from regress.untrusted_files import parse_json

NAME = "jsonl"

_SEAL = b',"sha256":"'


def encode(record: Record) -> list[bytes | memoryview]:
    """Return one line of text."""
    record = replace_tensors(record, {n: canonical_nans(a) for n, a in record.tensors.items()})
    tree = {key: _write(value) for key, value in to_payload(record).items()}
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return [text, _seal(text)]


def _seal(text: bytes) -> bytes:
    return _SEAL + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def _write(value: Any) -> Any:
    """Return the JSON tree of one payload entry: arrays become objects, non-finite floats are tagged."""
    if isinstance(value, np.ndarray):
        return _write_array(value)
    if isinstance(value, dict):
        return {key: _write(item) for key, item in value.items()}
    return tag_floats(value)


def _write_array(array: Array) -> dict[str, Any]:
    data: list[Any]
    if is_float(array.dtype):
        data = array.astype(np.float64).reshape(-1).tolist()
        if not all(map(math.isfinite, data)):
            data = [value if math.isfinite(value) else float_name(value) for value in data]
    else:
        data = array.reshape(-1).tolist()
    return {"dtype": dtype_name(array.dtype), "shape": list(array.shape), "data": data}


def matches(data: bytes) -> bool:
    """Return True if `data` begins like a JSON object."""
    return data.lstrip()[:1] == b"{"


def decode(data: bytes) -> list[Record]:
    """Return the records of a file, one a line; raises `Damage` naming the damaged line."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_decode_line(line))
        except (Damage, DumpError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damage(f"line {number} of {len(lines)} is damaged: {error}") from None
    return records


def _decode_line(line: bytes) -> Record:
    text, seal, _ = line.rpartition(_SEAL)
    if not seal:
        return read_foreign(
            parse_json(line, finite=False)
        )  # NexRL writes bare NaN; the reader of its files judges it
    if text + _seal(text) != line + b"\n":
        raise Damage("its text does not match its checksum")
    payload = loads(text + b"}")
    if not isinstance(payload, dict) or "regress" not in payload:
        raise Damage("it holds no record")
    return from_payload(payload, _read_array)


def _read_array(leaf: Any) -> Array:
    if not isinstance(leaf, dict) or leaf.keys() != {"dtype", "shape", "data"} or leaf["dtype"] not in DTYPES:
        raise Damage("a tensor is not written as dtype, shape and data")
    dtype, data = DTYPES[leaf["dtype"]], leaf["data"]
    if math.prod(leaf["shape"]) != len(data):
        raise Damage(f"a tensor of shape {leaf['shape']} has {len(data)} values")
    if is_float(dtype):
        values = [nonfinite(value) if isinstance(value, str) else value for value in data]
        array: Array = np.array(values, np.float64).astype(dtype)
    else:
        array = np.array(data, dtype)
    return array.reshape(leaf["shape"])
