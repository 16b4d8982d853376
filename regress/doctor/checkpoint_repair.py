"""Changes that the doctor makes where it is asked to, each after a backup of everything that it touches.

A backup is a folder ``.regress-doctor/backup-<time>``: copies of files by their path in the output directory, what was
moved out of the way, and ``backup.json``, which lists both. `restore` puts back what a repair or ``--backup`` has kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from regress import durable_files
from regress.doctor.check_context import CheckContext
from regress.doctor.checks.curriculum_check import content_fault, curriculum_of, text_of
from regress.doctor.checks.leftover_files import writer_of
from regress.doctor.checks.machine_check import readable
from regress.doctor.doctor_finding import Action, Issue, Move, Store, Write, clean
from regress.doctor.doctor_report import Report
from regress.doctor.examination import cleanup, examine
from regress.doctor.examined_checkpoint import find_target
from regress.doctor.file_restore import COPY_LIMIT
from regress.doctor.safe_tree import Tree, Unreadable, parsed, read_manifest, resealed
from regress.dump.dump_manifest import MANIFEST
from regress.durable_files import Stamp
from regress.engine.checkpoint.checkpoint_names import CURRICULUM_STATE
from regress.engine.tracking.tracker_state import STATE as TRACKING
from regress.errors import DoctorError

FOLDER, PREFIX, LIST = ".regress-doctor", "backup-", "backup.json"
BESIDE = (CURRICULUM_STATE, TRACKING, "config.yaml")
NEWEST = "newest"
ROUNDS = 8  # repairs that make others possible, at most


@dataclass
class Backup:
    """What was there before the changes of one verb; its list is written before the first of them.

    Attributes:
        reason: the verb.
        files: digest of each copy, by its path in the output directory.
        moved: where the files and folders are that were moved, by their old path.
        created: paths at which nothing was.
    """

    tree: Tree
    reason: str
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, tree: Tree, reason: str) -> Backup:
        """Make its folder; raises `DoctorError` where that would lie behind a link."""
        base = tree.root / FOLDER
        if base.is_symlink():
            raise DoctorError(
                f"{base} is a link, and backups are kept in a folder of that name; move the link away"
            )
        stamp = time.strftime(f"{PREFIX}%Y%m%dT%H%M%SZ", time.gmtime())
        number = 0
        while (folder := base / f"{stamp}-{number:03d}").exists():
            number += 1
        folder.mkdir(parents=True)
        return cls(tree, reason, folder)

    def copy(self, name: str) -> None:
        """Copy a file; raises `DoctorError` if it changes meanwhile."""
        place = _place(self.tree, name)
        if name in self.files or name in self.created:
            return
        if not os.path.lexists(place):
            self.created.append(name)
            return
        before = digest(place)
        durable_files.copy(place, self.folder / name)
        if digest(self.folder / name) != before:
            raise DoctorError(f"{name} changed while it was copied; stop the run that writes it")
        self.files[name] = before

    def write_list(self) -> None:
        """Write down what it holds."""
        content = {
            "schema_version": 1,
            **{k: v for k, v in vars(self).items() if k not in ("tree", "folder")},
        }
        durable_files.write(self.folder / LIST, [(json.dumps(content, indent=1) + "\n").encode()])


def digest(path: Path) -> str:
    """Return a text that is equal for equal content: hash of a file, or target of a link."""
    if path.is_symlink():
        return f"link {path.readlink()}"
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apply(tree: Tree, actions: Sequence[Action], backup: Backup | str) -> Backup | None:
    """Make changes after a backup of all that they touch; None if there was nothing to change.

    Args:
        backup: the one of changes that these go on with, or the verb that asks for them.

    Raises:
        DoctorError: if a file cannot be written; the sentence names the backup.
    """
    actions = [*_cleared(tree, [action for action in actions if not _done(tree, action)])]
    if not actions:
        return None
    require_idle(tree)
    with _explained_os_errors(tree.root):
        kept = Backup.make(tree, backup) if isinstance(backup, str) else backup
        batch = durable_files.Batch(tree.root)
        for action in actions:
            if isinstance(action, Write):
                if action.path not in kept.moved:
                    kept.copy(action.path)
                batch.write(_place(tree, action.path), [action.data])
            else:
                target = kept.folder / action.path if isinstance(action, Store) else tree.root / action.to
                kept.moved[action.path] = target.relative_to(tree.root).as_posix()
        kept.write_list()
    with _explained_os_errors(tree.root, f", and what was there is in {kept.folder}"):
        moves = [action for action in actions if not isinstance(action, Write)]
        for action in moves:
            if isinstance(action, Store):
                _move(tree, action.path, kept.moved[action.path])
        batch.commit()
        for action in moves:
            if isinstance(action, Move):
                _move(tree, action.path, action.to)
    return kept


def restore(context: CheckContext, name: str, *, dry_run: bool = False) -> tuple[Path, list[str]]:
    """Put back what a backup holds; what is there now is backed up first.

    Args:
        name: name of the backup's folder, or ``newest``.

    Raises:
        DoctorError: if there is no such backup, or it is damaged.
    """
    tree = context.tree
    folder, content = _chosen(context, name)
    base = f"{FOLDER}/{folder.name}"
    actions: list[Action] = []
    links: list[str] = []
    try:
        created = [path for path in content["created"] if tree.exists(path)]
        actions += [Store(path) for path in created]
        moved = {old: new for old, new in reversed(content["moved"].items()) if tree.exists(new)}
        for path, known in content["files"].items():
            if digest(tree.root / base / path) != known:
                raise Unreadable(f"holds another {clean(path)} than was copied")
            if path not in moved and digest(tree.root / path) == known:
                continue
            link = known.startswith("link ")
            links += [path] if link else []
            actions.append(Store(path) if link else Write(path, tree.read(f"{base}/{path}", COPY_LIMIT)))
    except (Unreadable, KeyError, AttributeError, TypeError) as error:
        raise DoctorError(
            f"{folder} is not a backup that can be trusted ({error}); choose another one"
        ) from None
    paths = [action.path for action in actions] + list(moved)
    if not dry_run and paths:
        require_idle(tree)
        with _explained_os_errors(tree.root):
            kept = Backup.make(tree, f"restore {folder.name}")
            for old, new in moved.items():
                if tree.exists(old):
                    kept.moved[old] = (kept.folder / old).relative_to(tree.root).as_posix()
                    _move(tree, old, kept.moved[old])
                _move(tree, new, old)
            for action in actions:
                (tree.root / action.path).parent.mkdir(parents=True, exist_ok=True)
        apply(tree, actions, kept)
        with _explained_os_errors(tree.root):
            for path in links:
                durable_files.copy(folder / path, tree.root / path)
    return folder, paths


def _chosen(context: CheckContext, name: str) -> tuple[Path, dict[str, dict[str, str]]]:
    """Return the folder of a backup and its list."""
    base = context.tree.root / FOLDER
    for folder in sorted(
        (p for p in base.glob(f"{PREFIX}*") if p.is_dir() and not p.is_symlink()), reverse=True
    ):
        if name not in (NEWEST, folder.name):
            continue
        try:
            content = context.tree.object(f"{FOLDER}/{folder.name}/{LIST}")
        except Unreadable as error:
            raise DoctorError(
                f"{folder} is not a backup that can be trusted ({error}); choose another one"
            ) from None
        if name != NEWEST or not str(content.get("reason")).startswith("restore"):
            return folder, content
    what = "no backup" if name == NEWEST else f"no backup {clean(name)}"
    raise DoctorError(f"{base} holds {what}; regress doctor --backup makes one")


def contents(context: CheckContext) -> list[str]:
    """Return the files that a backup of a run holds: the whole checkpoint, and the states beside it."""
    names = [] if context.target.checkpoint is None else context.tree.names(context.target.checkpoint)
    return [name for name in (*names, *BESIDE) if context.tree.is_file(name)]


def back_up(context: CheckContext) -> tuple[Path, list[str]]:
    """Copy them; return the backup's folder and the paths.

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
    with _explained_os_errors(context.tree.root):
        kept = Backup.make(context.tree, "backup")
        for name in names:
            kept.copy(name)
        kept.write_list()
    return kept.folder, names


def planned(tree: Tree, issues: Iterable[Issue]) -> list[Action]:
    """Return the changes that repair what can be repaired, with the manifests that must follow, moves last.

    Nothing is changed below a folder that is moved aside; a checkpoint that gets its right name is repaired first.
    """
    actions = list(
        dict.fromkeys(action for issue in issues if issue.fix is not None for action in issue.fix.actions)
    )
    moves = [action for action in actions if not isinstance(action, Write)]
    aside = tuple(f"{m.path}/" for m in moves if isinstance(m, Move) and m.to.startswith("broken-"))
    writes: dict[str, Write] = {}
    changed: dict[str, dict[str, Stamp]] = {}
    for action in actions:
        if not isinstance(action, Write) or action.path.startswith(aside) or action.path in writes:
            continue
        writes[action.path] = action
        if action.seal:
            checkpoint, _, name = action.path.partition("/")
            changed.setdefault(checkpoint, {})[name] = Stamp.of(action.data)
    for checkpoint, stamps in changed.items():
        try:
            seal = Write(f"{checkpoint}/{MANIFEST}", resealed(read_manifest(tree, checkpoint), stamps))
        except Unreadable:
            continue
        writes[seal.path] = seal
    return [*writes.values(), *moves]


def repair(context: CheckContext) -> Report:
    """Repair what can be repaired, and examine again, until nothing is left to repair."""
    found = before = examine(context)
    done: list[str] = []
    kept: Backup | None = None
    for _ in range(ROUNDS):
        changed = apply(context.tree, planned(context.tree, found), kept or "auto-fix")
        if changed is None:
            break
        kept = changed
        done += [issue.fix.summary for issue in found if issue.fix is not None]
        context = again(context)
        found = examine(context)
    return Report(context, found, [*dict.fromkeys(done)], None if kept is None else str(kept.folder), before)


def clean_up(context: CheckContext) -> Report:
    """Move leftovers into a backup; nothing else is looked at or changed."""
    before = cleanup(context)
    kept = apply(context.tree, planned(context.tree, before), "clean-only")
    done = [issue.fix.summary for issue in before if issue.fix is not None] if kept else []
    return Report(context, cleanup(again(context)), done, None if kept is None else str(kept.folder), before)


def create_fresh(context: CheckContext) -> Report:
    """Write the curriculum's state of the checkpoint beside the checkpoints, and examine.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data, stage = fresh(context)
    kept = apply(context.tree, [Write(CURRICULUM_STATE, data)], "create-fresh")
    done = [f"wrote {context.target.root / CURRICULUM_STATE} at {stage}"] if kept else []
    context = again(context)
    return Report(context, examine(context), done, None if kept is None else str(kept.folder))


def fresh(context: CheckContext) -> tuple[bytes, str]:
    """Return the state of the curriculum that `create_fresh` writes, and its stage in words.

    It is the one in the checkpoint's regress_state.json, else the one in its curriculum_state.json.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data = curriculum_of(context)
    if data is None and content_fault(found := context.object_of(CURRICULUM_STATE)) is None:
        data = text_of(found)
    if data is None:
        raise DoctorError(f"""{context.target.checkpoint or context.target.root} holds no state of a curriculum, so its
        stage is unknown, and starting at the first would be a guess; give a checkpoint of a run with
        curriculum.enable=true""")
    state = parsed(data)
    name = state["stages"][state["current_stage"]].get("name")
    return data, f"stage {state['current_stage']} ({clean(str(name))}), that of {context.target.checkpoint}"


def again(context: CheckContext) -> CheckContext:
    """Return the context as it is on disk now."""
    target = context.target
    named = target.root / (target.checkpoint or "")
    path = str(named if target.named and named.exists() else target.root)
    found = find_target(path, None, str(context.project_root))
    return replace(context, target=found, claimed=set(), unchecked=[])


def finished(context: CheckContext) -> CheckContext:
    """Finish the changes of a doctor that was killed, and return the context as it is then."""
    if not durable_files.unfinished(context.tree.root):
        return context
    require_idle(context.tree)
    with _explained_os_errors(context.tree.root):
        durable_files.finish(context.tree.root)
    return again(context)


def require_idle(tree: Tree) -> None:
    """Raise `DoctorError` if a process writes into the run."""
    process = writer_of(tree.root)
    if process is not None:
        raise DoctorError(
            f"process {process} is writing to {tree.root}, and a run that goes on must not be repaired; stop it first"
        )


def _done(tree: Tree, action: Action) -> bool:
    path = _place(tree, action.path)
    if isinstance(action, Write):
        return not path.is_symlink() and digest(path) == hashlib.sha256(action.data).hexdigest()
    return not os.path.lexists(path)


def _cleared(tree: Tree, actions: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions; what cannot be copied (a pipe, a folder) is moved away before a file takes its place."""
    for action in actions:
        path = _place(tree, action.path)
        if isinstance(action, Write) and not path.is_symlink() and path.exists() and not path.is_file():
            yield Store(action.path)
        yield action


def _place(tree: Tree, name: str) -> Path:
    """Return the place of a name whose folder is in the tree without any link; raises `DoctorError` otherwise."""
    path = tree.root.joinpath(*name.split("/"))
    if ".." in name.split("/") or path.parent.resolve() != path.parent:
        raise DoctorError(f"{clean(name)} lies behind a link or outside of {tree.root}, so it is not changed")
    return path


def _move(tree: Tree, name: str, to: str) -> None:
    path, target = _place(tree, name), tree.root / to
    if os.path.lexists(target):
        raise DoctorError(f"{to} exists already; move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    durable_files.sync(path.parent)


@contextmanager
def _explained_os_errors(root: Path, more: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DoctorError(f"""{error.filename or root} cannot be written ({error.strerror or error}){more}; free space
        there or mend the permissions""") from error
