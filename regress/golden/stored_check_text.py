"""Stored checks as text, of which git shows what changed; its numbers read back exactly.

::

    regress check 1
    name "loss"
    ...
    ["value", "dict", ""]
    ["value['kl']", "float64", [2, 3]]
    0.1 0.2 0.3
    0.4 0.5 0.6
    sha256 9f86d081884c7d65...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from regress.dump.canonical_json import dumps, loads
from regress.dump.numpy_arrays import DTYPES, Array, dtype_name, is_float
from regress.golden.value_tree import TENSOR, Node, Tree

LIMIT = 4096
"""Bytes that the tensors of a check have at most for it to be text."""

_FIRST = "regress check 1"
_SUM = "sha256 "


def encode(header: Mapping[str, Any], value: Tree) -> bytes | None:
    """Return a check as text; None if its tensors are larger than `LIMIT`, or do not read back bit for bit."""
    if sum(array.nbytes for array in value.tensors.values()) > LIMIT:
        return None
    lines = [_FIRST, *(f"{key} {dumps(header[key])}" for key in header)]
    for path, node in value.nodes.items():
        array = value.tensors.get(path)
        if array is None:
            lines.append(dumps([path, *node]))
            continue
        lines.append(dumps([path, dtype_name(array.dtype), list(array.shape)]))
        rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 and array.size else array.reshape(1, -1)
        lines += [" ".join(map(_number, row)) for row in rows if row.size]
    text = "".join(f"{line}\n" for line in lines).encode()
    whole = text + f"{_SUM}{hashlib.sha256(text).hexdigest()}\n".encode()
    return whole if _same(decode(whole)[1], value) else None


def _number(value: Any) -> str:
    """Return an element in decimal: as short as numpy can for its type, exact for types that numpy lacks."""
    if value.dtype.kind in "biu":
        return str(int(value))
    return str(value) if value.dtype in (np.float16, np.float32, np.float64) else repr(float(value))


def _same(one: Tree, other: Tree) -> bool:
    tensors = (
        (array.dtype, array.shape, array.tobytes()) == (another.dtype, another.shape, another.tobytes())
        for array, another in zip(one.tensors.values(), other.tensors.values(), strict=True)
    )
    return [*one.nodes.items()] == [*other.nodes.items()] and all(tensors)


def decode(data: bytes) -> tuple[dict[str, Any], Tree]:
    """Return header and value of a check; raises `ValueError` and its like for what `encode` does not write."""
    text, _, found = data.rpartition(_SUM.encode())
    if found != f"{hashlib.sha256(text).hexdigest()}\n".encode():
        raise ValueError("its content does not match its checksum")
    first, *lines = text.decode("ascii").splitlines()
    if first != _FIRST:
        raise ValueError(f"it does not begin with {_FIRST!r}")
    header: dict[str, Any] = {}
    nodes: dict[str, Node] = {}
    tensors: dict[str, Array] = {}
    rest = iter(lines)
    for line in rest:
        if not line.startswith("["):
            key, _, content = line.partition(" ")
            header[key] = loads(content)
            continue
        path, kind, content = loads(line)
        if not isinstance(content, list):
            nodes[path] = (kind, content)
            continue
        nodes[path] = TENSOR
        shape = [int(size) for size in content]
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count > LIMIT:
            raise ValueError(f"{path} cannot have the shape {content}")
        rows = count // (shape[-1] if len(shape) > 1 else count) if count else 0
        words = [word for _ in range(rows) for word in next(rest, "").split(" ")]
        dtype = DTYPES[kind]
        tensors[path] = np.array([_parsed(word, dtype) for word in words], dtype).reshape(shape)
    return header, Tree(nodes, tensors)


def _parsed(word: str, dtype: np.dtype[Any]) -> float | int:
    return float(word) if is_float(dtype) else int(word)
