"""Writing of whole files or none: on this machine by `regress.durable_files`, in a store by one upload."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

from regress import durable_files
from regress.dump.dump_location import Location
from regress.durable_files import TEMPORARY, Stamp
from regress.errors import DumpError
from regress.untrusted_files import open_file

__all__ = ["TEMPORARY", "Stamp"]

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
    errno.EISDIR: "a folder stands where a file is needed: move it away",
}


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
    try:
        return durable_files.write(path, chunks, fsync=fsync)
    except OSError as error:
        raise unwritable(path, error, place) from error


def stamp_of(data: bytes) -> Stamp:
    """Return the stamp of a file with this content."""
    return Stamp.of(data)


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
    if isinstance(path, Path):
        durable_files.sync(path)


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
    why = error.strerror if isinstance(error, OSError) else None
    return DumpError(f"{path} cannot be written ({why or error}): {remedy(error, place)}")


def remedy(error: Exception, place: str) -> str:
    """Return what helps against an error of a file that is written, such as another place, as a clause."""
    number = error.errno if isinstance(error, OSError) else None
    return _REMEDIES.get(number or 0, "choose another {place}").format(place=place)
