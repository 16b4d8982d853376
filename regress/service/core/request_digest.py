"""Digest and size of a request's content, by which a repeated request is recognised."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

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

    def take(self, value: object) -> None:
        self.size += _OVERHEAD
        if isinstance(value, Enum):
            self._mark("enum", f"{type(value).__name__}.{value.name}".encode())
        elif value is None or isinstance(value, bool | int | str):
            self._mark(type(value).__name__, str(value).encode())
        elif isinstance(value, float):
            self._mark("float", struct.pack("<d", value))
        elif isinstance(value, bytes):
            self._mark("bytes", value)
        elif isinstance(value, np.ndarray | np.generic) and not self._hashing:
            self.size += value.nbytes
        elif isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(value)
            self._mark(f"array {array.dtype.str} {np.shape(value)}", array.tobytes())
        elif isinstance(value, Mapping):
            self._mark("mapping", str(len(value)).encode())
            for name in sorted(value):
                self.take(name)
                self.take(value[name])
        elif is_dataclass(value) and not isinstance(value, type):
            self._mark("dataclass", type(value).__name__.encode())
            for field in fields(value):
                self.take(getattr(value, field.name))
        elif isinstance(value, Sequence):
            self._mark("sequence", str(len(value)).encode())
            for item in value:
                self.take(item)
        else:
            raise TypeError(f"{type(value).__name__} is not a type of a request")

    def _mark(self, kind: str, data: bytes) -> None:
        self.size += len(data)
        self.hash.update(f"{kind} {len(data)} ".encode())
        self.hash.update(data)
