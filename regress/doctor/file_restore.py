"""Repair of a file by another copy of the same bytes, proven by its hash; or an earlier checkpoint takes the place.

The hash is that of the checkpoint's manifest. What cannot be repaired is moved aside, so that a resume from `latest`
works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import PurePosixPath

from regress.doctor.check_context import CheckContext
from regress.doctor.doctor_finding import Fix, Issue, Move, Severity, Write
from regress.doctor.safe_tree import Tree, Unreadable, intact
from regress.dump.dump_files import Stamp

GROUPS = ("files", "weights", "state")
TOO_NEW = "unsupported_schema"
"""A checkpoint of a later release is not broken."""


def retired(context: CheckContext, issues: Iterable[Issue]) -> list[Issue]:
    """Return the findings, with the repair of moving the checkpoint aside where nothing else helps.

    It is not moved where it was named, or where no other checkpoint of the run is complete and unchanged.
    """
    found = list(issues)
    checkpoint = context.target.checkpoint
    hopeless = [issue for issue in found if _hopeless(issue, checkpoint)]
    if checkpoint is None or not hopeless or any(issue.type == TOO_NEW for issue in found):
        return found
    other = next((name for name in context.target.others if intact(context.tree, name)), None)
    if other is None:
        return found
    if context.target.named:
        return [_advised(issue, other) if issue in hopeless else issue for issue in found]
    move = Move(checkpoint, free_name(context.tree, f"broken-{checkpoint}"))
    fix = Fix(f"move {checkpoint} to {move.to}, so that a resume takes {other}", (move,))
    prefix = f"{checkpoint}/"
    of_it = [issue in hopeless or str(issue.path).startswith(prefix) for issue in found]
    return [replace(issue, fix=fix) if own else issue for issue, own in zip(found, of_it, strict=True)]


def _hopeless(issue: Issue, checkpoint: str | None) -> bool:
    path = str(issue.path)
    inside = path == checkpoint or path.startswith(f"{checkpoint}/")
    return inside and issue.severity is Severity.HIGH and issue.group in GROUPS and issue.fix is None


def _advised(issue: Issue, other: str) -> Issue:
    return replace(issue, command=issue.command or f"trainer.resume_from_checkpoint={other}")


def free_name(tree: Tree, name: str) -> str:
    """Return a name that nothing has: this one, or this one with a number."""
    number, free = 2, name
    while tree.exists(free):
        number, free = number + 1, f"{name}-{number}"
    return free


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
    """Return True for a place in a folder of the tree that is not a link, whatever stands there."""
    folder = (context.tree.root / path).parent
    return folder.is_dir() and folder.resolve() == folder.absolute()
