"""Reading and writing of a case's files: every byte read is checked, every file written is whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from regress import durable
from regress.dump.files import Stamp, write_atomically
from regress.errors import DumpError, GoldenError
from regress.inputs import open_file, read_bytes

RESTORE = "restore it from version control, or record the case again with regress golden record"

_CHUNK = 2**20
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "your quota is used up: free space there",
    errno.EFBIG: "a limit on file sizes is in force: raise it",
    errno.EROFS: "the file system is read-only: copy the golden directory to where you may write",
    errno.EACCES: "get the right to write there, or copy the golden directory",
    errno.EPERM: "get the right to write there, or copy the golden directory",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away",
    errno.EEXIST: "a file stands where a folder is needed: move it away",
    errno.EISDIR: "a folder stands where a file is needed: move it away",
}


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> Stamp:
    """Write a whole file or none; raises `GoldenError` naming path, reason and remedy."""
    try:
        return write_atomically(path, chunks)
    except DumpError as error:
        raise unwritable(path, error.__cause__ if isinstance(error.__cause__, OSError) else None) from error


def unwritable(path: Path, error: OSError | None) -> GoldenError:
    """Return the error for a path that cannot be written or removed; it states that the golden is unchanged."""
    cause = (error.strerror if error is not None else None) or "unknown reason"
    return GoldenError(
        f"{path} cannot be written ({cause}), so the golden is as it was before: {remedy(error)}"
    )


def remedy(error: OSError | None) -> str:
    """Return the remedy for a path that cannot be written."""
    return _REMEDIES.get(error.errno or 0 if error is not None else 0, "check the path")


def read_stamped(path: Path, stamp: Stamp) -> bytes:
    """Return the bytes of a file if they are those recorded; raises `GoldenError` naming the file otherwise."""
    try:
        size = path.stat().st_size  # before reading: a replaced file may be huge
        data = read_bytes(path) if size == stamp.size else b""
    except OSError as error:
        raise _unreadable(path, error) from error
    if size != stamp.size:
        raise _wrong_size(path, size, stamp)
    return matching(path, data, stamp)


def matching(path: Path, data: bytes, stamp: Stamp) -> bytes:
    """Return the content of a file if it is the recorded one; raises `GoldenError` naming the file otherwise."""
    if len(data) != stamp.size:
        raise _wrong_size(path, len(data), stamp)
    if hashlib.sha256(data).hexdigest() != stamp.sha256:
        raise GoldenError(f"{path} does not match its recorded hash, so it is damaged or changed: {RESTORE}")
    return data


def _wrong_size(path: Path, size: int, stamp: Stamp) -> GoldenError:
    return GoldenError(f"{path} has {size} bytes, but {stamp.size} were recorded: {RESTORE}")


def read_unstamped(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a file that has no recorded stamp; raises `GoldenError` when it cannot be read, or has
    more bytes than it may.
    """
    try:
        size = path.stat().st_size  # before reading: a replaced file may be huge
        if most is not None and size > most:
            raise GoldenError(f"{path} has {size} bytes, but at most {most} were recorded: {RESTORE}")
        return read_bytes(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def stamp_of(path: Path) -> Stamp:
    """Return size and hash of a file as it is; raises `GoldenError` when it cannot be read."""
    digest, size = hashlib.sha256(), 0
    try:
        with open_file(path) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return Stamp(size, digest.hexdigest())


def is_stamped(path: Path, stamp: Stamp) -> bool:
    """Return True if a file is the one that was recorded; raises `GoldenError` when it cannot be read.

    A file of another size is not hashed: one that replaced it may be huge.
    """
    try:
        if path.stat().st_size != stamp.size:
            return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return stamp_of(path) == stamp


def _unreadable(path: Path, error: OSError) -> GoldenError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return GoldenError(f"{path} is missing: {RESTORE}")
    return GoldenError(f"{path} cannot be read ({error.strerror}): check its permissions")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder; the lock ends with the process, however that ends.

    On a file system without locks, writers are not kept apart: each file is still whole.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(durable.locked(folder))
        except OSError as error:
            raise GoldenError(
                f"{folder} is no folder that can be read ({error.strerror}): check the path"
            ) from error
        yield
