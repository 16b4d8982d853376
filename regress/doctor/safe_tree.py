"""Safe reading of files that anybody may have written, and of the manifest that commits a checkpoint.

No link is followed out of the tree, no pipe opened, no bomb parsed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from regress.doctor.doctor_finding import clean
from regress.dump.dump_files import Stamp
from regress.dump.dump_manifest import MANIFEST
from regress.engine.checkpoint.checkpoint_manifest import manifest_bytes, parse_manifest
from regress.untrusted_files import is_hole, parse_json


@dataclass(frozen=True)
class Commit:
    """Content of a manifest.

    Attributes:
        files: size and hash by path relative to the checkpoint; empty if the manifest cannot be trusted.
        unsafe: paths that lead out of the checkpoint.
        complete: the manifest says that all was written.
    """

    files: dict[str, Stamp]
    unsafe: tuple[str, ...] = ()
    complete: bool = True


def read_manifest(tree: Tree, checkpoint: str) -> Commit:
    """Read the manifest of a checkpoint.

    Raises:
        Missing: if there is none.
        Unreadable: if it is damaged.
    """
    data = tree.read(f"{checkpoint}/{MANIFEST}")
    content = parsed(data)  # refuses what could exhaust memory
    listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise Unreadable("lists no files")
    unsafe = tuple(name for name in listed if not _safe(name))
    if unsafe or content.get("complete") is not True:
        return Commit({}, unsafe, content.get("complete") is True)
    try:
        return Commit(parse_manifest(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"is damaged ({clean(str(error))})") from None


def _safe(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def resealed(commit: Commit, changed: Mapping[str, Stamp]) -> bytes:
    """Return the manifest with the stamps of changed files in place of the old ones."""
    return manifest_bytes({**commit.files, **changed})


def fault(tree: Tree, checkpoint: str, name: str, stamp: Stamp, *, deep: bool) -> str | None:
    """Return what is wrong with a file of a checkpoint as half a sentence, or None.

    Args:
        deep: read the file and compare its hash, not only its size.
    """
    path = f"{checkpoint}/{name}"
    try:
        size = tree.size(path)
        if size != stamp.size:
            return f"has {size} bytes in place of {stamp.size}"
        if deep and (tree.size(path) != stamp.size or tree.stamp(path) != stamp):
            return "has another content than was written"
    except (Missing, Unsafe):
        raise
    except Unreadable as error:
        return str(error)
    return None


def intact(tree: Tree, checkpoint: str) -> bool:
    """Return True if a checkpoint is complete and every file of it is what was written, bit for bit."""
    try:
        commit = read_manifest(tree, checkpoint)
        if not commit.complete or commit.unsafe:
            return False
        faults = [fault(tree, checkpoint, name, stamp, deep=True) for name, stamp in commit.files.items()]
    except Unreadable:
        return False
    return not any(faults)


JSON_LIMIT = 64 * 2**20
"""Bytes of the largest JSON file that is parsed; a trainer_state.json of 100000 logged steps has 20 MiB."""
HEADER_LIMIT = 100_000_000
"""Bytes of the longest header that the format's own reader accepts."""
VALUE_LIMIT = 8_000_000
"""Values of the largest JSON file that is parsed: an empty list costs 3 bytes in the file and 64 in memory."""


class Unreadable(Exception):  # noqa: N818  # reads as what it is
    """A file that is not there or not what it should be; the message continues a sentence about it."""


class Missing(Unreadable):
    """There is no such file."""


class Unsafe(Unreadable):
    """A path out of the tree, or no ordinary file."""


class Tree:
    """Files below a folder, by their paths relative to it.

    Args:
        root: an existing folder; links in its own path are resolved once, here.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve(strict=True)

    def path(self, name: str) -> Path:
        """Return the place of a name; raises `Unsafe` if it points outside or through a link that does."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise Unsafe("is not a path below this folder")
        path = self.root.joinpath(*parts)
        try:
            inside = path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError) as error:
            raise Unsafe("is a link that leads nowhere or in a circle") from error
        if not inside:
            raise Unsafe("is reached through a link that leads out of this folder")
        return path

    def is_file(self, name: str) -> bool:
        """Return True for an ordinary file inside the tree."""
        try:
            return stat.S_ISREG(self._status(name).st_mode)
        except Unreadable:
            return False

    def exists(self, name: str) -> bool:
        """Return True for anything of this name, a broken link too."""
        return os.path.lexists(self.root / name)

    def size(self, name: str) -> int:
        """Return the bytes of an ordinary file; raises `Unreadable` for anything else."""
        found = self._status(name)
        _refuse_special(found)
        return found.st_size

    def stamp(self, name: str) -> Stamp:
        """Return size and SHA-256 of a file, read in parts; raises `Unreadable`."""
        with self.opened(name) as file:
            digest = hashlib.file_digest(file, "sha256")
            return Stamp(file.tell(), digest.hexdigest())

    def read(self, name: str, limit: int = JSON_LIMIT) -> bytes:
        """Return the bytes of a file; raises `Unreadable` if it is longer than any of its kind."""
        with self.opened(name) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise Unreadable(f"has more than {limit} bytes, which no file of its kind has")
        return data

    def json(self, name: str) -> Any:
        """Return the content of a JSON file; raises `Unreadable` for what is none, or is made to exhaust memory."""
        return parsed(self.read(name))

    def object(self, name: str) -> dict[str, Any]:
        """Return the content of a file that holds a JSON object; raises `Unreadable`."""
        tree = self.json(name)
        if not isinstance(tree, dict):
            raise Unreadable(f"holds a JSON {_kind(tree)} in place of an object")
        return tree

    def names(self, folder: str = "") -> list[str]:
        """Return all that is in a folder and below it, folders aside, sorted; links are not followed."""
        found: list[str] = []
        for where, folders, files in os.walk(self.root / folder, followlinks=False):
            links = [name for name in folders if (Path(where) / name).is_symlink()]
            found += [(Path(where) / name).relative_to(self.root).as_posix() for name in files + links]
        return sorted(found)

    @contextmanager
    def opened(self, name: str) -> Iterator[BufferedReader]:
        """Open an ordinary file for reading; raises `Unreadable`, also for what happens while it is open."""
        path = self.path(name)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:  # noqa: PTH123  # of a handle
                found = os.fstat(handle)
                _refuse_special(found)
                if is_hole(found):
                    raise Unreadable(f"has {found.st_size} bytes, nearly all of them a hole")
                yield file
        except FileNotFoundError:
            raise Missing("is missing") from None
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror or error})") from error

    def _status(self, name: str) -> os.stat_result:
        try:
            return self.path(name).stat()
        except FileNotFoundError:
            raise Missing("is missing") from None
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror or error})") from error


def parsed(data: bytes) -> Any:
    """Return the value of a JSON text; raises `Unreadable` with what is wrong with it."""
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUE_LIMIT:
        raise Unreadable(f"holds more than {VALUE_LIMIT} values, which no file of its kind has")
    try:
        return parse_json(data, finite=False)  # trainers write losses that are NaN
    except ValueError as error:
        raise Unreadable(f"is not JSON that can be read ({clean(str(error))})") from None


def _refuse_special(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise Unsafe("is a folder where a file should be")
    if not stat.S_ISREG(found.st_mode):
        raise Unsafe("is a named pipe, socket or device, not a file")


def _kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
