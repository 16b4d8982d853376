"""Memory-mapped arrays in files: only accessed parts are read, and their memory can be released."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from regress.dump.dump_files import unreadable
from regress.dump.numpy_arrays import Array
from regress.errors import DumpError

_WORTH = 1 << 16  # bytes


@dataclass(frozen=True)
class Region:
    """Tensor in a file of any kind that holds it in C order and little-endian.

    Attributes:
        offset: offset of its first byte.
    """

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def open(self) -> Array:
        """Return the tensor, read-only; nothing of it is read yet.

        Raises:
            DumpError: if the file cannot be read or is too short.
        """
        size = math.prod(self.shape) * self.dtype.itemsize
        data = map_file(self.path)
        if self.offset + size > data.size:
            raise DumpError(f"""{self.path} has {data.size} bytes, but a tensor should lie in
            {self.offset}:{self.offset + size}; it was cut off: copy or record it again""")
        return data[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


def map_file(path: Path) -> Array:
    """Return the bytes of a file, read-only; raises `DumpError` if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a named pipe has no bytes
        try:
            if not os.fstat(file).st_size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(file)
    except OSError as error:
        raise unreadable(path, error) from error


def release(array: Array) -> None:
    """Release a part of a mapped file from this process's memory; the next access reads it again.

    Arrays in other memory are left alone, and so are parts too small to be worth it.
    """
    if array.nbytes < _WORTH or array.flags.writeable:
        return
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap):
        origin = np.frombuffer(base, np.uint8, 1).ctypes.data
        low, high = (place - origin for place in byte_bounds(array))
        first, last = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            base.madvise(mmap.MADV_DONTNEED, first, last - first)
