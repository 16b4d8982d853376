"""Journal of an update of a golden directory: its files change all or none, however the process ends.

New files are written into `.journal/`, then `journal.json` lists their targets and the files to remove: from
then on the update is decided. The next process that opens the directory finishes a decided update, and
discards any other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from regress.dump.files import Stamp, stamp_of, sync_folder, write_atomically
from regress.errors import DumpError, GoldenError
from regress.golden.entries import stamp_from_json
from regress.golden.files import locked, remedy, unwritable
from regress.golden.files import stamp_of as file_stamp
from regress.golden.names import JOURNAL, PACKED
from regress.golden.sealed import read_sealed, seal

_FILE = "journal.json"
_SUFFIXES = (".json", ".safetensors", f".safetensors{PACKED}")


@dataclass(frozen=True)
class Step:
    """Change of one file within an update.

    Attributes:
        path: below the root.
        old: stamp of what stood there; None where nothing did.
        kept: name of its new bytes in the journal's folder; None removes the file.
        new: stamp of those.
    """

    path: str
    old: Stamp | None
    kept: str | None
    new: Stamp | None


class UnfinishedError(Exception):
    """A decided update that met an `OSError` at a path."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path, error)
        self.path, self.error = path, error


def settle(root: Path) -> None:
    """Finish or discard a killed process's update of a golden directory, which need not exist.

    Waits for a process in the middle of an update. Raises `GoldenError` when a decided update cannot be
    finished, as the directory then holds neither the old goldens nor the new ones.
    """
    if os.path.lexists(root / JOURNAL):
        with locked(root):
            settle_locked(root)


def settle_locked(root: Path) -> None:
    """Do what `settle` does; the caller holds the lock of the directory."""
    folder = root / JOURNAL
    if not os.path.lexists(folder):
        return
    repair = f"restore {root} from version control, remove {folder}, and run the update again"
    steps = read_sealed(folder / _FILE, _steps, repair)
    if steps is None:
        _clear(folder)
        return
    _verify(root, steps, repair)
    try:
        roll_forward(root, steps)
    except UnfinishedError as found:
        raise GoldenError(
            f"{folder} is an update that was broken off, and cannot be finished, because {found.path} cannot be "
            f"written ({found.error.strerror}), so the goldens may be partly old and partly new: {remedy(found.error)}"
        ) from found.error


def prepare(root: Path, files: Mapping[str, bytes | None], before: Mapping[str, bytes | None]) -> list[Step]:
    """Write the new files and the journal, safe on disk when this returns; nothing is left if it raises."""
    folder = root / JOURNAL
    target, steps = folder, []
    try:
        folder.mkdir()
        for number, (name, data) in enumerate(files.items()):
            target, old = root / name, before[name]
            kept = None if data is None else f"{number:04d}-{target.name}"
            new = None if data is None or kept is None else write_atomically(folder / kept, [data])
            steps.append(Step(name, None if old is None else stamp_of(old), kept, new))
        target = folder
        sync_folder(folder)
        write_atomically(folder / _FILE, [seal(_json(steps)).encode()])
    except (DumpError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        _clear(folder)
        raise unwritable(target, cause if isinstance(cause, OSError) else None) from error
    sync_folder(folder)
    sync_folder(root)
    return steps


def _verify(root: Path, steps: Iterable[Step], repair: str) -> None:
    """Raise `GoldenError` unless every file is as it was, with its new bytes intact in the journal, or as
    it will be.
    """
    for step in steps:
        target = root / step.path
        found = _stamp(target)
        if found == step.new:
            continue
        if found != step.old:
            problem = f"{target} was changed since"
        elif step.kept is not None and _stamp(root / JOURNAL / step.kept) != step.new:
            problem = f"what it has for {target} is missing or damaged"
        else:
            continue
        raise GoldenError(
            f"{root / JOURNAL} is an update that was broken off, and cannot be finished, because {problem}: {repair}"
        )


def _stamp(path: Path) -> Stamp | None:
    return file_stamp(path) if os.path.lexists(path) else None


def roll_forward(root: Path, steps: Iterable[Step]) -> None:
    """Do all remaining steps; raises `UnfinishedError`."""
    folder = root / JOURNAL
    target = folder
    try:
        for step in steps:
            target = root / step.path
            _take(root, step, target)
        for parent in sorted({parent for step in steps for parent in _folders(root, step)}):
            sync_folder(parent)
        target = folder
        _forget(folder)
    except OSError as error:
        raise UnfinishedError(target, error) from error
    _clear(folder)


def _take(root: Path, step: Step, target: Path) -> None:
    """Do one step; raises `OSError`."""
    if step.kept is None:
        with contextlib.suppress(NotADirectoryError):
            target.unlink(missing_ok=True)
        _remove_empty(target.parent, root)
    elif (root / JOURNAL / step.kept).exists():  # else an earlier attempt has done it
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / JOURNAL / step.kept).replace(target)


def _folders(root: Path, step: Step) -> Iterator[Path]:
    """Return the existing folders from the root to that of a file."""
    parents = (root / step.path).parents
    return (parent for parent in parents if parent.is_relative_to(root) and parent.is_dir())


def undone(root: Path, steps: Iterable[Step], before: Mapping[str, bytes | None]) -> bool:
    """Undo the steps and return True if that worked; each new file is kept until the journal is gone, so a
    kill is harmless.
    """
    folder = root / JOURNAL
    try:
        for step in steps:
            target, old = root / step.path, before[step.path]
            if step.kept is not None and not (folder / step.kept).exists():
                target.replace(folder / step.kept)
            if old is None:
                _remove_empty(target.parent, root)
            elif not target.exists():
                write_atomically(target, [old])
        _forget(folder)
    except (OSError, DumpError):
        return False
    _clear(folder)
    return True


def _forget(folder: Path) -> None:
    """Remove the file that makes a folder a journal; raises `OSError`."""
    (folder / _FILE).unlink(missing_ok=True)
    sync_folder(folder)


def _clear(folder: Path) -> None:
    """Remove the files of a folder that is no journal (any more); files that cannot be removed do no harm."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
        sync_folder(folder.parent)


def _remove_empty(folder: Path, root: Path) -> None:
    """Remove a folder below `root` and its parents, as far as they are empty."""
    while folder != root:
        try:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
        except OSError:  # it holds other files
            return
        folder = folder.parent


def _json(steps: Iterable[Step]) -> dict[str, Any]:
    def stamp(found: Stamp | None) -> dict[str, Any] | None:
        return None if found is None else dict(vars(found))

    return {"files": [[step.path, stamp(step.old), step.kept, stamp(step.new)] for step in steps]}


def _steps(tree: dict[str, Any]) -> list[Step]:
    """Return the steps of a journal; raises `ValueError` and its like for anything malformed."""
    if tree.keys() != {"files"}:
        raise ValueError("it does not consist of files")
    found = []
    for path, old, kept, new in tree["files"]:
        if (kept is None) != (new is None) or not _is_below(path):
            raise ValueError(f"{path!r} is no file of a golden directory")
        if kept is not None and (PurePosixPath(kept).name != kept or not path.endswith(_SUFFIXES)):
            raise ValueError(f"{kept!r} cannot become {path!r}")
        stamps = [None if stamp is None else stamp_from_json(stamp) for stamp in (old, new)]
        found.append(Step(path, stamps[0], kept, stamps[1]))
    return found


def _is_below(path: object) -> bool:
    """Return True if a path leads downwards from the golden directory, and not into the journal."""
    if not isinstance(path, str) or not path.isprintable():
        return False
    pure = PurePosixPath(path)
    return (
        str(pure) == path
        and not pure.is_absolute()
        and bool(pure.parts)
        and not {"..", JOURNAL} & set(pure.parts)
    )
