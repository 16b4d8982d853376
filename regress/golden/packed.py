"""Truth files on disk: as they are, or compressed where that saves a block of the file system.

The manifest names, sizes and hashes the plain content, so it does not depend on how a file is stored or on the
library that compressed it; either form is read, and neither is rewritten while its content stays.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from regress.dump.files import Stamp
from regress.errors import GoldenError
from regress.golden.files import RESTORE, matching, read_stamped, read_unstamped
from regress.golden.names import PACKED

_BLOCK = 4096
"""Bytes in which file systems allocate."""
_GZIP = 31
"""Window bits by which zlib reads a gzip file."""


def stored_as(name: str, data: bytes) -> tuple[str, bytes]:
    """Return the path and the bytes by which a truth file is stored: compressed if that takes fewer blocks."""
    packed = gzip.compress(data, 9, mtime=0)
    return (name + PACKED, packed) if _blocks(packed) < _blocks(data) else (name, data)


def _blocks(data: bytes) -> int:
    return -(-len(data) // _BLOCK)


def read_stored(roots: Sequence[Path], name: str, stamp: Stamp) -> tuple[Path, bytes]:
    """Return the path of a truth file and its plain content, every byte of it verified.

    Args:
        roots: folders it may lie in; the first that has it is used.
        name: path that the manifest has for it.

    Raises:
        GoldenError: naming the file, if it is missing or not what was recorded.
    """
    places = (root / (name + end) for root in roots for end in ("", PACKED))
    path = next((place for place in places if place.exists()), roots[-1] / name)
    if path.suffix != PACKED:
        return path, read_stamped(path, stamp)
    return path, matching(path, read_plain(path, stamp.size), stamp)


def read_plain(path: Path, size: int) -> bytes:
    """Return the content of a truth file, decompressed if it is stored so, but not much more than was recorded.

    Args:
        size: bytes of the plain content as recorded; a compressed file is never larger.

    Raises:
        GoldenError: if it cannot be read, or is no compressed file.
    """
    if path.suffix != PACKED:
        return read_unstamped(path)
    data = read_unstamped(path, size)
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        plain = stream.decompress(data, size + 1)
        if len(plain) > size:
            raise zlib.error(f"it holds more than the {size} bytes that were recorded")
        if not stream.eof or stream.unused_data:
            raise zlib.error("it was cut off, or something follows")
    except zlib.error as error:
        raise GoldenError(f"{path} is no intact compressed file ({error}): {RESTORE}") from None
    return plain
