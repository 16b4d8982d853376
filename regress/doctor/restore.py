"""Repair of a file by another copy of the same bytes, proven by the hash in the checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from regress.doctor.issue import Fix, Write
from regress.doctor.scene import Scene
from regress.doctor.tree import Unreadable
from regress.dump.files import Stamp

COPY_LIMIT = 2**30
"""Bytes of the largest file that is put back automatically: repairs are held in memory until all are known."""


def restored(scene: Scene, path: str) -> Fix | None:
    """Return the repair that puts a file of the checkpoint back from elsewhere in the run, or None.

    Args:
        path: relative to the output directory.
    """
    name = path.removeprefix(f"{scene.target.checkpoint}/")
    stamp = None if scene.commit is None else scene.commit.files.get(name)
    if stamp is None or not _replaceable(scene, path):
        return None
    for place in _places(scene, name):
        if place != path and _holds(scene, place, stamp):
            data = scene.tree.read(place, COPY_LIMIT)
            return Fix(f"put {path} back from {place}, which holds the same bytes", (Write(path, data),))
    return None


def _places(scene: Scene, name: str) -> Iterator[str]:
    for folder in (*scene.target.others, "final"):
        yield f"{folder}/{name}"
    yield PurePosixPath(name).name
    kept = sorted((scene.tree.root / ".regress-doctor").glob("backup-*"), reverse=True)
    for backup in kept:
        yield f".regress-doctor/{backup.name}/{scene.target.checkpoint}/{name}"


def _holds(scene: Scene, place: str, stamp: Stamp) -> bool:
    try:
        size = scene.tree.size(place)
        return size == stamp.size <= COPY_LIMIT and scene.tree.stamp(place) == stamp
    except Unreadable:
        return False


def _replaceable(scene: Scene, path: str) -> bool:
    """Return True for a place in a folder of the tree that is no link, whatever stands there."""
    folder = (scene.tree.root / path).parent
    return folder.is_dir() and folder.resolve() == folder.absolute()
