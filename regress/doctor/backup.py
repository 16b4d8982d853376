"""Copies of a checkpoint and of the states beside it, verified by hash, and how they are put back."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from regress.doctor.check_context import CheckContext
from regress.doctor.checks.machine import readable
from regress.doctor.issue import Action, Write, clean
from regress.doctor.journal import FOLDER, apply
from regress.doctor.restore import COPY_LIMIT
from regress.doctor.tree import Unreadable
from regress.durable import TEMPORARY, publish
from regress.engine.checkpoint.names import CURRICULUM_STATE
from regress.engine.tracking.state import STATE as TRACKING
from regress.errors import DoctorError

PREFIX, LIST = "backup-", "backup.json"
BESIDE = (CURRICULUM_STATE, TRACKING, "config.yaml")
NEWEST = "newest"


def contents(context: CheckContext) -> list[str]:
    """Return the files that a backup holds: the whole checkpoint, and the states beside it."""
    names = [] if context.target.checkpoint is None else context.tree.names(context.target.checkpoint)
    return [name for name in (*names, *BESIDE) if context.tree.is_file(name)]


def make(context: CheckContext) -> tuple[Path, list[str]]:
    """Copy them to ``.regress-doctor/backup-<time>``; return that folder and the paths.

    Raises:
        DoctorError: if there is nothing to copy, or no space for it.
    """
    names = contents(context)
    needed = sum(context.tree.size(name) for name in names)
    if not names:
        raise DoctorError(
            f"{context.target.root} holds neither a checkpoint nor a state to copy; name another folder"
        )
    if context.free(context.target.root) < needed:
        raise DoctorError(
            f"{context.target.root} has not the {readable(needed)} that a backup takes; free space there"
        )
    folder = _fresh(context)
    partial = folder.with_name(f"{TEMPORARY}{folder.name}")
    try:
        stamps = {name: _copied(context, name, partial / name) for name in names}
        (partial / LIST).write_text(json.dumps({"schema_version": 1, "files": stamps}, indent=1) + "\n")
        publish(partial, folder)
    except (OSError, Unreadable) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DoctorError(f"{folder} cannot be written ({error}); free space there") from error
    return folder, names


def _fresh(context: CheckContext) -> Path:
    base = context.tree.root / FOLDER
    if base.is_symlink():
        raise DoctorError(
            f"{base} is a link, and backups are kept in a folder of that name; move the link away"
        )
    name = f"{PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    number = 0
    while (base / f"{name}-{number:03d}").exists():
        number += 1
    return base / f"{name}-{number:03d}"


def _copied(context: CheckContext, name: str, to: Path) -> dict[str, int | str]:
    to.parent.mkdir(parents=True, exist_ok=True)
    stamp = context.tree.stamp(name)
    with context.tree.opened(name) as source, to.open("xb") as target:
        shutil.copyfileobj(source, target, 2**20)
    shutil.copystat(context.tree.root / name, to)
    relative = to.relative_to(context.tree.root).as_posix()
    if context.tree.stamp(relative) != stamp:
        raise Unreadable(f"{name} changed while it was copied")
    return {"size": stamp.size, "sha256": stamp.sha256}


def restore(context: CheckContext, name: str, *, dry_run: bool = False) -> tuple[Path, list[str]]:
    """Put back every file of a backup that differs; an undo takes it back.

    Args:
        name: name of the backup's folder, or ``newest``.

    Raises:
        DoctorError: if there is no such backup, or it is damaged.
    """
    folder = _chosen(context, name)
    base = f"{FOLDER}/{folder.name}"
    writes: list[Action] = []
    try:
        files = context.tree.object(f"{base}/{LIST}")["files"]
        for path, row in files.items():
            stamp = context.tree.stamp(f"{base}/{path}")
            if {"size": stamp.size, "sha256": stamp.sha256} != row:
                raise Unreadable(f"holds another {clean(path)} than was copied")
            if not context.tree.is_file(path) or context.tree.stamp(path) != stamp:
                writes.append(Write(path, context.tree.read(f"{base}/{path}", COPY_LIMIT)))
    except (Unreadable, KeyError, AttributeError, TypeError) as error:
        raise DoctorError(
            f"{folder} is no backup that can be trusted ({error}); choose another one"
        ) from None
    if not dry_run:
        for write in writes:
            (context.tree.root / write.path).parent.mkdir(parents=True, exist_ok=True)
        apply(context.tree, writes, f"restore {folder.name}")
    return folder, [write.path for write in writes]


def _chosen(context: CheckContext, name: str) -> Path:
    base = context.tree.root / FOLDER
    found = sorted(path for path in base.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink())
    if name != NEWEST:
        found = [path for path in found if path.name == Path(name).name]
    if not found:
        told = "no backup" if name == NEWEST else f"no backup {clean(name)}"
        raise DoctorError(f"{base} holds {told}; regress doctor --backup makes one")
    return found[-1]
