"""The manifest of a checkpoint, which commits it: size and hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from regress.doctor.issue import shown
from regress.doctor.tree import Missing, Tree, Unreadable, Unsafe
from regress.dump.files import Stamp
from regress.dump.jsontext import dumps
from regress.dump.manifest import MANIFEST

DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Commit:
    """Content of a manifest.

    Attributes:
        files: size and hash by path relative to the checkpoint.
        unsafe: paths that lead out of the checkpoint.
        complete: the manifest says that all was written.
        tree: the whole JSON object.
    """

    files: dict[str, Stamp]
    unsafe: tuple[str, ...]
    complete: bool
    tree: Mapping[str, Any]


def read_commit(tree: Tree, checkpoint: str) -> Commit:
    """Read the manifest of a checkpoint.

    Raises:
        Missing: if there is none.
        Unreadable: if it is damaged.
    """
    content = tree.object(f"{checkpoint}/{MANIFEST}")
    listed = content.get("files")
    if content.get("kind", "checkpoint") != "checkpoint":
        raise Unreadable("is not that of a checkpoint")
    if not isinstance(listed, dict):
        raise Unreadable("lists no files")
    if content.get("sha256") != checksum(content):
        raise Unreadable("does not match its own checksum")
    unsafe = tuple(name for name in listed if not _safe(name))
    files = {name: _stamp(name, row) for name, row in listed.items() if name not in unsafe}
    return Commit(files, unsafe, content.get("complete") is True, content)


def _safe(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _stamp(name: str, row: Any) -> Stamp:
    size, digest = (row.get("size"), row.get("sha256")) if isinstance(row, dict) else (None, None)
    if type(size) is not int or not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= DIGITS:
        raise Unreadable(f"tells no size and SHA-256 of {shown(name)}")
    return Stamp(size, digest)


def resealed(commit: Commit, changed: Mapping[str, Stamp]) -> bytes:
    """Return the manifest with the stamps of changed files in place of the old ones."""
    files = dict(commit.tree["files"])
    for name, stamp in changed.items():
        row = files.get(name)
        files[name] = {**(row if isinstance(row, dict) else {}), "size": stamp.size, "sha256": stamp.sha256}
    tree = {**commit.tree, "files": files}
    tree["sha256"] = checksum(tree)
    return (json.dumps(tree, sort_keys=True, indent=1) + "\n").encode()


def checksum(tree: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest, which stands in it beside the rest."""
    return hashlib.sha256(dumps({key: tree[key] for key in tree if key != "sha256"}).encode()).hexdigest()


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
        if deep and tree.stamp(path) != stamp:
            return "has another content than was written"
    except (Missing, Unsafe):
        raise
    except Unreadable as error:
        return str(error)
    return None


def intact(tree: Tree, checkpoint: str) -> bool:
    """Return True if a checkpoint is complete and every file of it is what was written, bit for bit."""
    try:
        commit = read_commit(tree, checkpoint)
        if not commit.complete or commit.unsafe:
            return False
        faults = [fault(tree, checkpoint, name, stamp, deep=True) for name, stamp in commit.files.items()]
    except Unreadable:
        return False
    return not any(faults)
