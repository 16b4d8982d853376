"""Repair of a file by another copy of the same bytes, proven by the hash in the checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from regress.doctor.check_context import CheckContext
from regress.doctor.issue import Fix, Write
from regress.doctor.tree import Unreadable
from regress.dump.files import Stamp

COPY_LIMIT = 2**30
"""Bytes of the largest file that is put back automatically: repairs are held in memory until all are known."""


def restored(context: CheckContext, path: str) -> Fix | None:
    """Return the repair that puts a file of the checkpoint back from elsewhere in the run, or None.

    Args:
        path: relative to the output directory.
    """
    name = path.removeprefix(f"{context.target.checkpoint}/")
    stamp = None if context.commit is None else context.commit.files.get(name)
    if stamp is None or not _replaceable(context, path):
        return None
    for place in _places(context, name):
        if place != path and _holds(context, place, stamp):
            data = context.tree.read(place, COPY_LIMIT)
            return Fix(f"put {path} back from {place}, which holds the same bytes", (Write(path, data),))
    return None


def _places(context: CheckContext, name: str) -> Iterator[str]:
    for folder in (*context.target.others, "final"):
        yield f"{folder}/{name}"
    yield PurePosixPath(name).name
    kept = sorted((context.tree.root / ".regress-doctor").glob("backup-*"), reverse=True)
    for backup in kept:
        yield f".regress-doctor/{backup.name}/{context.target.checkpoint}/{name}"


def _holds(context: CheckContext, place: str, stamp: Stamp) -> bool:
    try:
        size = context.tree.size(place)
        return size == stamp.size <= COPY_LIMIT and context.tree.stamp(place) == stamp
    except Unreadable:
        return False


def _replaceable(context: CheckContext, path: str) -> bool:
    """Return True for a place in a folder of the tree that is no link, whatever stands there."""
    folder = (context.tree.root / path).parent
    return folder.is_dir() and folder.resolve() == folder.absolute()
