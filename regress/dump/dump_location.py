"""Location of a dump: a folder of this machine, or one of an object store that a URL names.

A `Path` and a `RemotePath` share the part of pathlib that dumps are read and written with. Functions that
take a dump directory, a folder of it or a file pass it through `location`, and then need not know which of
the two it is.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from regress import untrusted_files
from regress.errors import DumpError

if TYPE_CHECKING:
    from regress.dump.object_store import RemotePath

Location: TypeAlias = "Path | RemotePath"

_LOCAL = ("file://", "local://")


def location(path: str | Location) -> Location:
    """Return the location that a path or a URL names: `runs/3`, `file:///runs/3`, `s3://bucket/runs/3`,
    `memory://runs/3`.

    Raises `DumpError` for a URL whose protocol is unknown here, that lacks its slashes, or cannot be one of a dump.
    """
    if isinstance(path, Path):
        _refuse_collapsed(path)
        return _possible(path)
    if not isinstance(path, str):
        return path
    if is_remote(path):
        from regress.dump.object_store import open_url  # fsspec is loaded by who needs it

        return open_url(path)
    return local_folder(path)


def _possible(path: Path) -> Path:
    """Return the path; raises `DumpError` for one that no file can have."""
    if "\0" in str(path) or any(len(part.encode(errors="replace")) > 255 for part in path.parts):
        raise DumpError(
            f"{str(path)[:80]!r} cannot be the path of a file: a name has at most 255 bytes, and no null byte"
        )
    return path


def is_remote(path: str) -> bool:
    """Return True if a text is a URL of something other than this machine's files; a chain of URLs is."""
    start = next((start for start in _LOCAL if path.startswith(start)), "")
    return "://" in path[len(start) :]


def address(place: Location) -> str:
    """Return text that `location` turns into the same place; unlike `str` it holds a user's name, so never
    show it.
    """
    return str(place) if isinstance(place, Path) else place.url


def children(folder: Location) -> list[Location]:
    """Return the direct children of a folder, by name; none if there is no such folder.

    Raises `DumpError` if it cannot be listed.
    """
    try:
        return sorted(folder.iterdir(), key=str)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DumpError(
            f"{folder} cannot be listed ({error.strerror or error}): check its permissions"
        ) from error


def size(path: Location) -> int:
    """Return the size of a file in bytes; raises `DumpError` if it cannot be looked at."""
    try:
        return path.stat().st_size if isinstance(path, Path) else path.size
    except OSError as error:
        raise DumpError(
            f"{path} cannot be read ({error.strerror or error}): check the path and its permissions"
        ) from error


def opened(path: Location) -> IO[bytes]:
    """Open a file for reading, downloaded from a store. Raises `OSError`, also if it is not an ordinary file."""
    return untrusted_files.open_file(path) if isinstance(path, Path) else BytesIO(path.read_bytes())


def read_bytes(path: Location, limit: int | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        limit: most bytes that a file of its kind has, on this machine.

    Raises:
        OSError: if it cannot be read, or is not an ordinary file (a named pipe, a device).
    """
    return untrusted_files.read_bytes(path, limit) if isinstance(path, Path) else path.read_bytes()


def local_path(path: str) -> Path:
    """Return the folder or file of this machine that a path or a `file://` URL names; raises `DumpError`
    for others.
    """
    if is_remote(path):
        raise DumpError(
            f"{path} is the URL of a store, but a folder of this machine is needed here: give its path"
        )
    if not path.startswith(_LOCAL):
        return Path(path)
    url, path = path, path.partition("://")[2]
    if not path.startswith("/"):
        raise DumpError(
            f"{url} names a machine and not a folder of this one: give three slashes (file:///...), or the path"
        )
    return Path(path)


def local_folder(path: str) -> Path:
    """Return the folder of this machine that a text names; raises `DumpError` for one that was meant as a URL."""
    _refuse_without_slashes(path)
    return _possible(local_path(path))


def _refuse_collapsed(path: Path) -> None:
    """Refuse `s3:/bucket`, which pathlib makes of `s3://bucket`, and which would become a folder of that name."""
    first = path.parts[0] if path.parts else ""
    if len(path.parts) > 1 and first.endswith(":") and _is_protocol(first[:-1]):
        raise DumpError(f"{path} was a URL before pathlib took one of its slashes: give the URL as text")


def _refuse_without_slashes(path: str) -> None:
    """Refuse `s3:bucket`, which was meant as `s3://bucket`."""
    protocol, colon, rest = path.rpartition("::")[2].partition(":")
    if colon and not rest.startswith("//") and _is_protocol(protocol):
        raise DumpError(
            f"{path} lacks the slashes of a URL: write {protocol}://..., or ./{protocol}:... for a file of this machine"
        )


def _is_protocol(name: str) -> bool:
    if not name.isalnum():
        return False
    from fsspec.registry import known_implementations

    return name.lower() in known_implementations
