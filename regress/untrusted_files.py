"""Files that anybody may have written, as bytes and as JSON: no pipe is waited for, no bomb unpacked, no key twice.

`read_bytes` and `parse_json` are the one way in which such files are read. What they refuse is an `OSError` or a
`ValueError` with a clause about the file; a reader makes its own sentence of it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NoReturn

from regress.printable_text import printable

DEPTH = 200
"""Levels of the deepest JSON that is read; far below the recursion limit of what walks through it."""
GROWTH = 12
"""Bytes in memory for each byte of JSON that are taken as ordinary: numbers of three characters."""
SPARE = 150 * 2**20
"""Bytes in memory that JSON of any form may take."""

DOCUMENT = 1 << 28
"""Most bytes of a document that is one JSON value, a manifest of a million files among them."""

_LARGE, _SPARSE = (
    1 << 28,
    64,
)  # a file system that compresses stores no recording in a sixty-fourth of its size
_VALUE, _CONTAINER = 24, 88  # bytes in memory, about
_LONG = re.compile(rb"\d{20}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = {byte: 1 if byte in b"[{" else -1 for byte in b"[]{}"}
_SHOWN = 160

Pairs = Callable[[dict[str, Any]], Any]


class TwiceError(ValueError):
    """An object has a key twice.

    Attributes:
        key: the key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {printable(repr(key[:80]))} is there twice")
        self.key = key


def open_file(path: Path | str) -> IO[bytes]:
    """Open an ordinary file for reading.

    Raises:
        OSError: if it cannot be opened, or is a folder, a named pipe, a socket or a device, which is not waited for.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a named pipe, a socket or a device, not a file", str(path))
        return open(handle, "rb")  # noqa: PTH123  # of a handle
    except BaseException:
        os.close(handle)
        raise


def is_hole(found: os.stat_result) -> bool:
    """Return True for a large file of which hardly anything is stored: to read it would take time for nothing."""
    return found.st_size > _LARGE and found.st_blocks * 512 * _SPARSE < found.st_size


def read_bytes(path: Path | str, limit: int | None = None) -> bytes:
    """Return the bytes of an ordinary file.

    Args:
        limit: most bytes that a file of its kind has.

    Raises:
        OSError: if it cannot be read, is not an ordinary file, or has more bytes than that.
    """
    with open_file(path) as file:
        found = os.fstat(file.fileno())
        size = found.st_size
        if is_hole(found):
            raise OSError(errno.EFBIG, f"it has {size} bytes, nearly all of them a hole", str(path))
        if limit is None:
            return file.read()
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise OSError(
            errno.EFBIG, f"it has {max(size, len(data))} bytes, more than any file of its kind", str(path)
        )
    return data


def parse_json(
    text: bytes | str, *, finite: bool = True, wide: bool = False, pairs: Pairs | None = None
) -> Any:
    """Return the value of a JSON text.

    Args:
        finite: refuse bare NaN and Infinity, which are not JSON but are what Python writes.
        wide: accept integers of more than 64 bits, of a few thousand digits at most.
        pairs: makes a value of each object; by default the object itself.

    Raises:
        ValueError: with a clause: for what is not valid JSON, an object that has a key twice, an integer over 64
            bits, nesting deeper than `DEPTH`, and values that would take far more memory than the text.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    _refuse_bombs(data)
    options: dict[str, Any] = {"parse_constant": _refused_constant} if finite else {}
    if not wide and _LONG.search(data):
        options["parse_int"] = _integer
    try:
        return json.loads(data, object_pairs_hook=_once(pairs), **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except TwiceError:
        raise
    except ValueError as error:
        raise ValueError(_clause(error)) from None


def _clause(error: ValueError) -> str:
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refuse_growth(data: bytes) -> None:
    """Raise `ValueError` with a clause for JSON that takes far more memory than its text."""
    needed = (data.count(b"[") + data.count(b"{")) * _CONTAINER + data.count(b",") * _VALUE
    if needed > SPARE + GROWTH * len(data):
        raise ValueError(f"its {len(data)} bytes hold more values than memory should be given to")


def _refuse_bombs(data: bytes) -> None:
    refuse_growth(data)
    if data.count(b"[") + data.count(b"{") > DEPTH and _depth(data) > DEPTH:
        raise ValueError(f"it is nested deeper than {DEPTH} levels")


def _depth(data: bytes) -> int:
    """Return the number of levels; brackets in texts are none."""
    brackets = _STRING.sub(b"", data).translate(None, _OTHERS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the integer {text[:20]}... has more than 64 bits")
    return value


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(f"bare {name} is not JSON")


def _once(pairs: Pairs | None) -> Callable[[list[tuple[str, Any]]], Any]:
    def made(items: list[tuple[str, Any]]) -> Any:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in found if names.count(name) > 1)
            raise TwiceError(twice)
        return found if pairs is None else pairs(found)

    return made
