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

from regress.doctor.issue import Action, Store, Write, clean
from regress.doctor.processes import writer_of
from regress.doctor.tree import Tree, Unreadable
from regress.dump.files import TEMPORARY, sync_folder
from regress.errors import DoctorError

FOLDER, JOURNAL = ".regress-doctor", "journal.json"
SCHEMA_VERSION = 1
ABSENT, LINK, DIRECTORY = "absent", "link", "folder"


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


def digest(path: Path) -> str:
    """Return a text that is equal for equal content: hash of a file, target of a link, or of all below a folder."""
    if path.is_symlink():
        return f"{LINK} {path.readlink()}"
    if not os.path.lexists(path):
        return ABSENT
    if path.is_dir():
        parts = [f"{part.relative_to(path).as_posix()} {digest(part)}" for part in sorted(path.rglob("*"))]
        return f"{DIRECTORY} {hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"
    if not path.is_file():
        return f"special {path.stat().st_mode}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apply(tree: Tree, actions: Sequence[Action], reason: str) -> Path | None:
    """Make changes, all or as far as they go, and return their journal; None if there was nothing to change.

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
        _write_journal(folder, reason, steps, "prepared")
        try:
            for step, action in zip(steps, actions, strict=True):
                _make(tree, step, action)
        except BaseException:
            for step in reversed(steps):
                _undo(tree, step)
            _write_journal(folder, reason, steps, "undone")
            raise
        _write_journal(folder, reason, steps, "applied")
    return folder


def undo(tree: Tree) -> tuple[Path, list[str]]:
    """Take back the newest repair that was not taken back; return its journal and the paths that are as before.

    Raises:
        DoctorError: if there is none, or if something that it changed was changed again since.
    """
    folder, reason, steps = _newest(tree)
    _require_idle(tree)
    with _told(tree.root):
        written = {step.path for step in steps if step.kind == "write"}
        for step in reversed(steps):
            _require_undoable(tree, step, step.path in written)
        for step in reversed(steps):
            _undo(tree, step)
        _write_journal(folder, reason, steps, "undone")
    return folder, [step.path for step in steps]


def newest(tree: Tree) -> tuple[Path, list[str]]:
    """Return the journal that `undo` would take back, and the paths that it would change."""
    folder, _, steps = _newest(tree)
    return folder, [step.path for step in steps]


def _newest(tree: Tree) -> tuple[Path, str, list[Step]]:
    for folder in sorted((tree.root / FOLDER).glob("*"), reverse=True):
        content = _read_journal(tree, folder)
        if content is not None and content["status"] != "undone":
            return folder, content["reason"], [Step(**row) for row in content["steps"]]
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
        _replace(path, action.data)
        return
    to = _place(tree, step.to or "")
    if os.path.lexists(to):
        raise DoctorError(f"{step.to} exists already; move it away")
    path.rename(to)
    sync_folder(path.parent)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file, or the link in its place, at once; permissions stay."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    mode = None if path.is_symlink() or not path.exists() else path.stat().st_mode
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode & 0o7777)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
        kept = _place(tree, step.kept)
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        shutil.copy2(kept, temporary, follow_symlinks=False)
        temporary.replace(path)
    sync_folder(path.parent)


def _write_journal(folder: Path, reason: str, steps: Sequence[Step], status: str) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "reason": reason,
        "status": status,
        "steps": [vars(step) for step in steps],
    }
    _replace(folder / JOURNAL, (json.dumps(content, indent=1) + "\n").encode())


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
        _ = content["status"], content["reason"]
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
