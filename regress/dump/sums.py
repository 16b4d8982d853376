"""Checksums of a file's chunks: any part of a file is verified by reading that part.

A manifest names for each file the CRC-32 of every mebibyte, as eight hexadecimal digits one after the other. CRC-32
finds every change of up to 32 bits in a row, and any other but one in four thousand million; the SHA-256 of the whole
file, which stands beside it, tells files apart and is not needed to read them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from regress.dump.location import Location, opened, size

CHUNK = 1 << 20
"""Bytes of a chunk; the last one of a file may be shorter."""
_DIGITS = 8

Span = tuple[int, int]
"""First byte of a part of a file, and the one behind its last."""


class ChunkSums:
    """Sums of the chunks of a file, taken while its buffers pass by."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open = 0
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
            self._open = zlib.crc32(part, self._open)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == CHUNK:
                self._done.append(self._open)
                self._open = self._filled = 0

    @property
    def text(self) -> str:
        """Sums of all chunks so far, as they stand in a manifest."""
        last = [self._open] if self._filled else []
        return "".join(f"{value:0{_DIGITS}x}" for value in (*self._done, *last))


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
        OSError: if the file cannot be read.
    """
    if size(path) != length:
        return 0, length
    buffer = memoryview(bytearray(min(CHUNK, length)))
    with opened(path) as file:
        for number in _numbers(length, spans):
            start, stop = number * CHUNK, min((number + 1) * CHUNK, length)
            file.seek(start)
            part = buffer[: stop - start]
            whole = file.readinto(part) == len(part)  # type: ignore[attr-defined]  # a buffered file
            if (
                not whole
                or f"{zlib.crc32(part):0{_DIGITS}x}" != text[number * _DIGITS : (number + 1) * _DIGITS]
            ):
                return start, stop
    return None


def _numbers(length: int, spans: Iterable[Span] | None) -> Iterable[int]:
    if spans is None:
        return range(-(-length // CHUNK))
    return sorted({number for start, stop in spans for number in range(start // CHUNK, -(-stop // CHUNK))})
