"""The manifest of a checkpoint, which commits it: size and hash of every file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from regress.doctor.issue import clean
from regress.doctor.tree import Missing, Tree, Unreadable, Unsafe, parsed
from regress.dump.files import Stamp
from regress.dump.manifest import MANIFEST
from regress.engine.checkpoint.manifest import manifest_bytes, parse_manifest


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
