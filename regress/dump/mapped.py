"""Arrays that lie in files: only what is looked at is read, and can be given back."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.arrays import Array
from regress.dump.files import unreadable
from regress.errors import DumpError


@dataclass(frozen=True)
class Region:
    """A tensor in a file of any kind that holds it in C order and little-endian.

    Attributes:
        offset: of its first byte.
    """

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def open(self) -> Array:
        """The tensor, read-only; nothing of it is read yet.

        Raises:
            DumpError: if the file cannot be read or is too short.
        """
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        data = map_file(self.path)
        if self.offset + size > data.size:
            raise DumpError(
                f"{self.path} has {data.size} bytes, but a tensor should lie in {self.offset}:{self.offset + size}; "
                "it was cut off: copy or record it again"
            )
        return data[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


def map_file(path: Path) -> Array:
    """The bytes of a file, read-only; raises `DumpError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise unreadable(path, error) from error


def release(array: Array) -> None:
    """Take a contiguous part of a mapped file out of this process's memory; looked at again, it is read again.

    Whatever else holds an array is left alone.
    """
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or array.flags.writeable:
        return
    begin = array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        base.madvise(mmap.MADV_DONTNEED, first, last - first)
