"""Repairs as transactions: every change is written down, with what was there, before it is made, and can be undone.

A journal is a folder ``.regress-doctor/<time>`` in the output directory: ``journal.json`` and the files that were there
before. A repair that was killed half-way is undone like a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress import durable
from regress.doctor.content import ABSENT, digest
from regress.doctor.issue import Action, Store, Write, clean
from regress.doctor.processes import writer_of
from regress.doctor.tree import Tree, Unreadable
from regress.errors import DoctorError

FOLDER, JOURNAL = ".regress-doctor", "journal.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Step:
    """One change of one path.

    Attributes:
        kind: `write`, or `move` (also into the journal).
        path: what changes, relative to the output directory.
        to: for a move, where it goes.
        before: what lies at `path` before: its digest, see `digest`.
        after: for a write, the digest afterwards.
        kept: for a write, the copy of what was there, relative to the output directory; None if nothing was.
    """

    kind: str
    path: str
    to: str | None
    before: str
    after: str | None
    kept: str | None


@dataclass(frozen=True)
class Journal:
    """Content of a journal.

    Attributes:
        reason: the verb that asked for the changes.
        continues: name of the journal whose changes these go on with, so that one undo takes back both; or None.
    """

    folder: Path
    reason: str
    continues: str | None
    steps: tuple[Step, ...]

    def write(self, status: str) -> None:
        """Write the journal down: its changes are `prepared`, `applied` or `undone`."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "reason": self.reason,
            "continues": self.continues,
            "status": status,
            "steps": [vars(step) for step in self.steps],
        }
        durable.write(self.folder / JOURNAL, [(json.dumps(content, indent=1) + "\n").encode()])


def apply(tree: Tree, actions: Sequence[Action], reason: str, continues: Path | None = None) -> Path | None:
    """Make changes, all or as far as they go, and return their journal; None if there was nothing to change.

    Args:
        continues: journal of the changes that these belong to.

    Raises:
        DoctorError: if a file cannot be written; what was changed until then is undone.
    """
    actions = [*_cleared(tree, [action for action in actions if not _done(tree, action)])]
    if not actions:
        return None
    _require_idle(tree)
    with _told(tree.root):
        folder = _new_folder(tree)
        steps: list[Step] = []
        for number, action in enumerate(actions):
            free = any(step.path == action.path for step in steps)
            steps.append(_planned(tree, folder, number, action, free))
        journal = Journal(folder, reason, None if continues is None else continues.name, tuple(steps))
        journal.write("prepared")
        try:
            for step, action in zip(steps, actions, strict=True):
                _make(tree, step, action)
        except BaseException:
            for step in reversed(steps):
                _undo(tree, step)
            journal.write("undone")
            raise
        journal.write("applied")
    return folder


def undo(tree: Tree) -> tuple[Path, list[str]]:
    """Take back the newest repair that was not taken back; return its journal and the paths that are as before.

    Raises:
        DoctorError: if there is none, or if something that it changed was changed again since.
    """
    _require_idle(tree)
    paths: list[str] = []
    while True:
        journal = _newest(tree)
        _take_back(tree, journal)
        paths += [step.path for step in journal.steps]
        if journal.continues is None:
            return journal.folder, paths


def _take_back(tree: Tree, journal: Journal) -> None:
    with _told(tree.root):
        written = {step.path for step in journal.steps if step.kind == "write"}
        for step in reversed(journal.steps):
            _require_undoable(tree, step, step.path in written)
        for step in reversed(journal.steps):
            _undo(tree, step)
        journal.write("undone")


def newest(tree: Tree) -> tuple[Path, list[str]]:
    """Return the journal that `undo` would take back, and the paths that it would change."""
    journal = _newest(tree)
    return journal.folder, [step.path for step in journal.steps]


def _newest(tree: Tree) -> Journal:
    for folder in sorted((tree.root / FOLDER).glob("*"), reverse=True):
        content = _read_journal(tree, folder)
        if content is not None and content["status"] != "undone":
            steps = tuple(Step(**row) for row in content["steps"])
            return Journal(folder, content["reason"], content["continues"], steps)
    raise DoctorError(f"{tree.root / FOLDER} holds no repair that could be undone")


def _require_idle(tree: Tree) -> None:
    process = writer_of(tree.root)
    if process is not None:
        raise DoctorError(
            f"process {process} is writing to {tree.root}, and a run that goes on must not be repaired; stop it first"
        )


def _done(tree: Tree, action: Action) -> bool:
    path = _place(tree, action.path)
    if isinstance(action, Write):
        return path.is_file() and not path.is_symlink() and digest(path) == _digest_of(action.data)
    return not os.path.lexists(path)


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _place(tree: Tree, name: str) -> Path:
    """Return the place of a name whose folder is in the tree without any link; raises `DoctorError` otherwise."""
    path = tree.root.joinpath(*name.split("/"))
    if ".." in name.split("/") or path.parent.resolve() != path.parent:
        raise DoctorError(f"{clean(name)} lies behind a link or outside of {tree.root}, so it is not changed")
    return path


def _new_folder(tree: Tree) -> Path:
    base = tree.root / FOLDER
    if base.is_symlink():
        raise DoctorError(
            f"{base} is a link, and repairs are kept in a folder of that name; move the link away"
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 0
    while True:
        folder = base / f"{stamp}-{number:03d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1


def _cleared(tree: Tree, actions: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions; what cannot be copied (a pipe, a folder) is moved away before a file takes its place."""
    for action in actions:
        path = _place(tree, action.path)
        if isinstance(action, Write) and not path.is_symlink() and path.exists() and not path.is_file():
            yield Store(action.path)
        yield action


def _planned(tree: Tree, folder: Path, number: int, action: Action, free: bool) -> Step:
    """Return the step, with a copy of what it will replace in the journal's folder.

    Args:
        free: an earlier step moves away what is there.
    """
    path = _place(tree, action.path)
    before = ABSENT if free else digest(path)
    if isinstance(action, Write):
        kept = None
        if before != ABSENT:
            copy = folder / f"{number:04d}-{path.name}"
            shutil.copy2(path, copy, follow_symlinks=False)
            if digest(copy) != before:
                raise DoctorError(f"{action.path} changed while it was copied; stop the run that writes it")
            kept = copy.relative_to(tree.root).as_posix()
        return Step("write", action.path, None, before, _digest_of(action.data), kept)
    if isinstance(action, Store):
        to = (folder / f"{number:04d}-{path.name}").relative_to(tree.root).as_posix()
        return Step("move", action.path, to, before, None, None)
    return Step("move", action.path, action.to, before, None, None)


def _make(tree: Tree, step: Step, action: Action) -> None:
    path = _place(tree, step.path)
    if isinstance(action, Write):
        durable.write(path, [action.data], keep_mode=True)
        durable.sync(path.parent)
        return
    to = _place(tree, step.to or "")
    if os.path.lexists(to):
        raise DoctorError(f"{step.to} exists already; move it away")
    path.rename(to)
    durable.sync(path.parent)


def _require_undoable(tree: Tree, step: Step, written: bool) -> None:
    """Refuse to undo what was changed since.

    Args:
        written: another step writes the same path, and tells whether it was changed.
    """
    path = _place(tree, step.path)
    now = ABSENT if written and step.kind == "move" else digest(path)
    if step.kind == "write":
        fits = now in (step.before, step.after)
    else:
        moved = digest(_place(tree, step.to or ""))
        fits = (now, moved) in ((step.before, ABSENT), (ABSENT, step.before))
    if not fits:
        raise DoctorError(
            f"{clean(step.path)} was changed after the repair, so the repair is not undone; move it away, or take the "
            f"old files from {tree.root / FOLDER} yourself"
        )


def _undo(tree: Tree, step: Step) -> None:
    """Bring back what was there; nothing happens where the step was not made."""
    path = _place(tree, step.path)
    if digest(path) == step.before:
        return
    if step.kind == "move":
        _place(tree, step.to or "").rename(path)
    elif step.kept is None:
        path.unlink()
    else:
        durable.copy(_place(tree, step.kept), path)
    durable.sync(path.parent)


def _read_journal(tree: Tree, folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a journal; None for a folder that is none, or that was killed before it changed a file."""
    name = f"{FOLDER}/{folder.name}/{JOURNAL}"
    if not tree.is_file(name):
        return None
    try:
        content = tree.object(name)
        known = {"kind", "path", "to", "before", "after", "kept"}
        if content.get("schema_version") != SCHEMA_VERSION:
            raise Unreadable("is of another release")
        if not all(isinstance(row, dict) and row.keys() == known for row in content["steps"]):
            raise Unreadable("describes no steps of a repair")
        if not all(isinstance(row["path"], str) for row in content["steps"]):
            raise Unreadable("names no paths")
        _ = content["status"], content["reason"], content["continues"]
    except KeyError as error:
        raise DoctorError(f"{folder / JOURNAL} lacks {error}, so nothing can be undone by it") from None
    except Unreadable as error:
        raise DoctorError(f"{folder / JOURNAL} {error}, so nothing can be undone by it") from None
    return content


@contextlib.contextmanager
def _told(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DoctorError(
            f"{error.filename or root} cannot be written ({error.strerror or error}), so what was changed has been put "
            "back; free space there or mend the permissions"
        ) from error
