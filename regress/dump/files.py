"""Whole files or none: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from regress.errors import DumpError

TEMPORARY = ".partial-"  # files of this prefix are what a killed writer leaves; readers ignore them

_REMEDIES = {
    errno.ENOSPC: "free space there or choose another dump directory",
    errno.EDQUOT: "your quota is used up: free space or choose another dump directory",
    errno.EFBIG: "a limit on file sizes is in force: raise it or dump fewer types",
    errno.EROFS: "the file system is read-only: choose another dump directory",
    errno.EACCES: "choose a dump directory in which you may write",
    errno.EPERM: "choose a dump directory in which you may write",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another dump directory",
    errno.EEXIST: "a file stands where a folder is needed: choose another dump directory",
}


@dataclass(frozen=True)
class Stamp:
    """What a manifest says about a file: its size in bytes and the SHA-256 of its bytes in hex."""

    size: int
    sha256: str


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> Stamp:
    """Write a file so that `path` holds either all of it or what it held before.

    Raises `DumpError` with path, reason and remedy; the temporary file is removed then.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = _write(temporary, chunks)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from error
    return stamp


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> Stamp:
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())
    return Stamp(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make renames within a folder outlast a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unwritable(path: Path, error: OSError) -> DumpError:
    """The error of a path that cannot be written, with the remedy for its cause."""
    remedy = _REMEDIES.get(error.errno or 0, "choose another dump directory")
    return DumpError(f"{path} cannot be written ({error.strerror or error}): {remedy}")
