"""Mutations of bytes, whatever they say."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random


def flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\0"
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 3, 20))):
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _extend(data: bytes, random: Random) -> bytes:
    return data + random.choice((b"\0" * 9, random.randbytes(100), data, b"}" * 5, b"\n"))


def _splice(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    start, stop = sorted(random.randrange(len(data) + 1) for _ in range(2))
    at = random.randrange(len(data) + 1)
    piece = random.choice((data[start:stop], b"", random.randbytes(8), b"\xff" * 8, b"\0" * 8))
    return data[:at] + piece + data[at + random.choice((0, len(piece), 1)) :]


def _head(data: bytes, random: Random) -> bytes:
    value = random.choice((0, 1, 7, 2**31, 2**40, 2**63, 2**64 - 1, len(data), max(0, len(data) - 8)))
    return struct.pack("<Q", value) + data[8:]


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (flip, flip, _truncate, _extend, _splice, _head)
