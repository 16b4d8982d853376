"""Checksums of a file's chunks: any part of a file is verified by reading that part.

A manifest names for each file the XXH3 (64 bits) of every mebibyte, as sixteen hexadecimal digits one after the other.
It is as fast as memory, so that verification costs little beside a comparison; the SHA-256 of the whole file, which
stands beside it, tells files apart and is not needed to read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from xxhash import xxh3_64, xxh3_64_hexdigest

from regress.dump.dump_location import Location, opened, size
from regress.dump.mapped_arrays import map_file, release

CHUNK = 1 << 20
"""Bytes of a chunk; the last one of a file may be shorter."""
_DIGITS = 16

Span = tuple[int, int]
"""First byte of a part of a file, and the one behind its last."""


class ChunkSums:
    """Sums of the chunks of a file, taken while its buffers pass by."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open = xxh3_64()
        self._filled = 0

    def passing(self, buffers: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the buffers, having added them up."""
        for buffer in buffers:
            self.add(memoryview(buffer))
            yield buffer

    def add(self, data: memoryview) -> None:
        """Add bytes."""
        while data:
            part = data[: CHUNK - self._filled]
            self._open.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == CHUNK:
                self._done.append(self._open.hexdigest())
                self._open.reset()
                self._filled = 0

    @property
    def text(self) -> str:
        """Sums of all chunks so far, as they stand in a manifest."""
        return "".join([*self._done, *([self._open.hexdigest()] if self._filled else [])])


def file_sums(path: Location) -> str:
    """Return the sums of a file's chunks; raises `OSError` if it cannot be read."""
    sums = ChunkSums()
    with opened(path) as file:
        while data := file.read(CHUNK):
            sums.add(memoryview(data))
    return sums.text


def fits(text: str, length: int) -> bool:
    """Return True if a text has a sum for each chunk of a file of this many bytes."""
    return len(text) == _DIGITS * -(-length // CHUNK)


def damaged_chunk(path: Location, text: str, length: int, spans: Iterable[Span] | None = None) -> Span | None:
    """Return the first chunk that does not have its sum; None if all have.

    Args:
        text: sums of the chunks of all of the file.
        length: bytes that the file should have.
        spans: parts of which every chunk is read; by default all of the file.

    Raises:
        DumpError: if the file cannot be read.
    """
    if size(path) != length:
        return 0, length
    data = map_file(path) if isinstance(path, Path) else np.frombuffer(path.read_bytes(), np.uint8)
    found = None
    for number in _numbers(length, spans):
        start, stop = number * CHUNK, min((number + 1) * CHUNK, length)
        known = text[number * _DIGITS : (number + 1) * _DIGITS]
        if data.size != length or xxh3_64_hexdigest(data[start:stop].data) != known:
            found = start, stop
            break
    release(data)
    return found


def _numbers(length: int, spans: Iterable[Span] | None) -> Iterable[int]:
    if spans is None:
        return range(-(-length // CHUNK))
    return sorted({number for start, stop in spans for number in range(start // CHUNK, -(-stop // CHUNK))})
