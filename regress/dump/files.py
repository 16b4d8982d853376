"""Writing of whole files or none: locally by temporary name, fsync and rename, in a store by one upload."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from regress.dump.location import Location
from regress.errors import DumpError
from regress.inputs import open_file

TEMPORARY = ".partial-"  # a killed writer leaves files with this prefix; readers ignore them

_REMEDIES = {
    errno.ENOSPC: "free space there or choose another {place}",
    errno.EDQUOT: "your quota is used up: free space or choose another {place}",
    errno.EFBIG: "a limit on file sizes is in force: raise it or dump fewer types",
    errno.EROFS: "the file system is read-only: choose another {place}",
    errno.EACCES: "choose a {place} in which you may write",
    errno.EPERM: "choose a {place} in which you may write",
    errno.ENXIO: "it is a socket, or a named pipe that nobody reads: start its reader first, or choose another {place}",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another {place}",
    errno.EEXIST: "a file stands where a folder is needed: choose another {place}",
}


@dataclass(frozen=True)
class Stamp:
    """Manifest entry of a file: its size in bytes and the SHA-256 of its bytes in hex."""

    size: int
    sha256: str


def write_atomically(
    path: Location, chunks: Iterable[bytes | memoryview], *, fsync: bool = True, place: str = "dump directory"
) -> Stamp:
    """Write a file so that `path` holds either all of it or what it held before.

    A file for a store is assembled in memory and uploaded at once.

    Args:
        fsync: wait until the disk has it, so that this holds after a power failure, too.
        place: what a remedy tells to choose another of.

    Raises:
        DumpError: with path, reason and remedy; the temporary file is removed then. A device, a named pipe or a socket
            is never replaced.
    """
    if not isinstance(path, Path):
        data = b"".join(chunks)
        path.write_bytes(data)
        return stamp_of(data)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(path)
        stamp = _write(temporary, chunks, fsync)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error, place) from error
    return stamp


def _refuse_special(path: Path) -> None:
    """Raise `OSError` for what a rename must not replace; a link and a regular file are replaced."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is a device, a named pipe or a socket")


def _write(path: Path, chunks: Iterable[bytes | memoryview], fsync: bool) -> Stamp:
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        if fsync:
            os.fsync(file.fileno())
    return Stamp(size, digest.hexdigest())


def stamp_of(data: bytes) -> Stamp:
    """Return the stamp of a file with this content."""
    return Stamp(len(data), hashlib.sha256(data).hexdigest())


def file_stamp(path: Path, size: int | None = None) -> Stamp:
    """Return the stamp of a file, read in parts.

    Args:
        size: size that it should have; a file of another size is not read, and its stamp has no hash.

    Raises:
        DumpError: if it cannot be read.
    """
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if size not in (None, found):
                return Stamp(found, "")
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # a buffered file
            return Stamp(file.tell(), digest.hexdigest())
    except OSError as error:
        raise unreadable(path, error) from error


def sync_folder(path: Location) -> None:
    """Make renames within a folder outlast a power failure, where the file system can; a store has none."""
    if not isinstance(path, Path):
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def probe(folder: Location) -> None:
    """Check that a folder can be written, and create it if it is on this machine.

    Raises `OSError` or `DumpError` if not.
    """
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{TEMPORARY}probe"
    file.write_bytes(b"")
    file.unlink()


def remove_tree(folder: Location) -> None:
    """Remove a folder with all it holds, as far as possible; warn of files left in a store, because they
    cost money.
    """
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        folder.rmtree()
    except DumpError as error:
        warnings.warn(str(error), stacklevel=2)


def unreadable(path: Location, error: OSError) -> DumpError:
    """Return the error for a path that exists and cannot be read."""
    return DumpError(f"{path} cannot be read ({error.strerror or error}): check the path and its permissions")


def unwritable(path: Location, error: Exception, place: str = "dump directory") -> DumpError:
    """Return the error for a path that cannot be written, with the remedy for its cause: another place, for example."""
    number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    remedy = _REMEDIES.get(number or 0, "choose another {place}").format(place=place)
    return DumpError(f"{path} cannot be written ({why or error}): {remedy}")
