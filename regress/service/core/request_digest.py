"""Digest and size of a request's content, by which a repeated request is recognised."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

_OVERHEAD = 64
"""Bytes that a small value takes in memory, about."""


@dataclass(frozen=True)
class Content:
    """Digest of a value, SHA-256 in hex, and its size in memory in bytes, about."""

    digest: str
    size: int


def content_of(*values: object) -> Content:
    """Return the content of values made of dataclasses, mappings, sequences, arrays, enums and plain values.

    Equal values have the same digest, NaN equals itself, and arrays are equal if dtype, shape and bytes are.

    Raises:
        TypeError: if a value is of another type.
    """
    walk = _Walk()
    walk.take(values)
    return Content(walk.hash.hexdigest(), walk.size)


def size_of(value: object) -> int:
    """Return the size of such a value in memory in bytes, about."""
    walk = _Walk(hashing=False)
    walk.take(value)
    return walk.size


class _Walk:
    def __init__(self, *, hashing: bool = True) -> None:
        self.hash = hashlib.sha256()
        self.size = 0
        self._hashing = hashing

    def take(self, value: Any) -> None:
        self.size += _OVERHEAD
        _taker(value.__class__)(self, value)

    def array(self, value: Any) -> None:
        if not self._hashing:
            self.size += value.nbytes
            return
        array = np.ascontiguousarray(value)
        self.mark(f"array {array.dtype.str} {np.shape(value)}", array.tobytes())

    def mapping(self, value: Mapping[str, Any]) -> None:
        self.mark("mapping", str(len(value)).encode())
        for name in sorted(value):
            self.take(name)
            self.take(value[name])

    def sequence(self, value: Sequence[Any]) -> None:
        self.mark("sequence", str(len(value)).encode())
        for item in value:
            self.take(item)

    def mark(self, kind: str, data: bytes) -> None:
        self.size += len(data)
        if self._hashing:
            self.hash.update(b"%s %d %s" % (kind.encode(), len(data), data))


@cache
def _taker(kind: type) -> Callable[[_Walk, Any], None]:
    """Return what takes values of a type, whose rules are looked up once."""
    name = kind.__name__
    if issubclass(kind, Enum):
        return lambda walk, value: walk.mark("enum", f"{name}.{value.name}".encode())
    if issubclass(kind, bool | int | str | None):
        return lambda walk, value: walk.mark(name, str(value).encode())
    if issubclass(kind, float):
        return lambda walk, value: walk.mark("float", struct.pack("<d", value))
    if issubclass(kind, bytes):
        return lambda walk, value: walk.mark("bytes", value)
    if issubclass(kind, np.ndarray | np.generic):
        return _Walk.array
    if issubclass(kind, Mapping):
        return _Walk.mapping
    if is_dataclass(kind):
        parts = [field.name for field in fields(kind)]

        def take(walk: _Walk, value: Any) -> None:
            walk.mark("dataclass", name.encode())
            for part in parts:
                walk.take(getattr(value, part))

        return take
    if issubclass(kind, Sequence):
        return _Walk.sequence
    raise TypeError(f"{name} is not a type of a request")
