"""Pending changes of stored checks: one new file each, in `.pending/checks/`, until it is accepted or rejected.

Beside the file lies a note of the stored file that it would replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from regress.dump.arrays import Array
from regress.dump.files import Stamp
from regress.dump.reader import read
from regress.errors import DumpError, GoldenError
from regress.golden.difference import Change, change_of
from regress.golden.entries import stamp_from_json
from regress.golden.files import read_stamped, read_unstamped, stamp_of
from regress.golden.names import CHECKS, PENDING
from regress.golden.sealed import read_sealed, seal
from regress.golden.store import GoldenStore
from regress.golden.transaction import Changes, transaction

SUFFIX = ".safetensors"
_NOTE = ".json"


@dataclass(frozen=True)
class PendingCheck:
    """Pending new version of a stored check, or a pending new check.

    Attributes:
        name: its path within the golden directory, such as `checks/test_x/loss.safetensors`.
        base: stamp of the stored file at the time of the proposal; None if there was none.
        data: the new file, verified.
    """

    name: str
    base: Stamp | None
    data: bytes


def is_check(name: object) -> bool:
    """Return True if a path within the golden directory can be that of a stored check."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or len(path.parts) < 2 or path.parts[0] != CHECKS:
        return False
    return path.suffix == SUFFIX and not any(part.startswith(".") for part in path.parts)


def propose_check(store: GoldenStore, name: str, chunks: Iterable[bytes | memoryview]) -> Path:
    """Keep a new file for a stored check for review; a later proposal replaces an earlier one.

    `name` is its path within the golden directory. Returns the path of the kept file. Raises `GoldenError` when it
    cannot be written.
    """
    with transaction(store.root) as changes:
        return plan_check(changes, store, name, chunks)


def plan_check(changes: Changes, store: GoldenStore, name: str, chunks: Iterable[bytes | memoryview]) -> Path:
    """Add to a transaction the files that keep a new check for review; see `propose_check`."""
    if not is_check(name):
        raise GoldenError(f"{name!r} is no stored check: its path is {CHECKS}/...{SUFFIX}")
    path = store.root / PENDING / name
    note = {"base": _json(_stored(store, name)), "file": _json(changes.write(path, chunks))}
    changes.write(_note(path), [seal(note).encode()])
    return path


def pending_checks(store: GoldenStore) -> list[str]:
    """Return the names of the checks with a pending change, intact or not."""
    root = store.root / PENDING
    found = (path.relative_to(root).as_posix() for path in (root / CHECKS).rglob(f"*{SUFFIX}{_NOTE}"))
    return sorted(name for path in found if is_check(name := path.removesuffix(_NOTE)))


def pending_check(store: GoldenStore, name: str) -> PendingCheck:
    """Return one pending change, every byte verified; raises `GoldenError` naming what is missing or damaged."""
    path = store.root / PENDING / name

    def parse(tree: dict[str, Any]) -> PendingCheck:
        base = None if tree["base"] is None else stamp_from_json(tree["base"])
        return PendingCheck(name, base, read_stamped(path, stamp_from_json(tree["file"])))

    found = read_sealed(_note(path), parse, f"reject it with regress golden reject {CHECKS}")
    if found is None:
        raise GoldenError(f"{path} is no pending change: see regress golden review")
    return found


def check_change(store: GoldenStore, name: str) -> Change:
    """Describe the effect of accepting a pending change; raises `GoldenError` as `pending_check` does."""
    pending_check(store, name)
    new = _tensors(store.root / PENDING / name)
    old = _tensors(store.root / name) if (store.root / name).exists() else None
    if old is None:
        return Change(CHECKS, name, "new", len(new), len(new))
    return change_of(CHECKS, name, old, new)


def accept_checks(store: GoldenStore, patterns: Sequence[str] = ()) -> list[Path]:
    """Apply the pending changes that match a pattern, or all of them; return the files written.

    Raises `GoldenError` before anything is written when a pending file is damaged, or its check was stored
    again since.
    """
    with transaction(store.root) as changes:
        chosen = [pending_check(store, name) for name in _matching(store, patterns)]
        for check in chosen:
            stored = _stored(store, check.name)
            if stored != check.base and read_or_nothing(store.root / check.name) != check.data:
                raise GoldenError(
                    f"{store.root / check.name} was changed since its update was proposed: reject the update and run "
                    "pytest --update-golden=review again"
                )
            changes.write(store.root / check.name, [check.data])
            discard_check(changes, store, check.name)
        return changes.paths()


def reject_checks(store: GoldenStore, patterns: Sequence[str] = ()) -> list[str]:
    """Drop the pending changes that match a pattern, or all of them; return their names."""
    with transaction(store.root) as changes:
        names = _matching(store, patterns)
        for name in names:
            discard_check(changes, store, name)
        return names


def discard_check(changes: Changes, store: GoldenStore, name: str) -> None:
    """Add to a transaction the removal of a pending change, if there is one."""
    path = store.root / PENDING / name
    changes.remove(_note(path))
    changes.remove(path)


def read_or_nothing(path: Path) -> bytes | None:
    """Return the bytes of a file, or None where there is none."""
    return read_unstamped(path) if path.exists() else None


def _matching(store: GoldenStore, patterns: Sequence[str]) -> list[str]:
    names = pending_checks(store)
    known = {name: (name, *label_of(store.root / PENDING / name)) for name in names}
    for pattern in patterns:
        if not any(matches(pattern, texts) for texts in known.values()):
            raise GoldenError(
                f"no pending check matches {pattern!r}: pending are {', '.join(names) or 'none'}"
            )
    return [name for name in names if not patterns or any(matches(p, known[name]) for p in patterns)]


def matches(pattern: str, texts: Iterable[str]) -> bool:
    """Return True if a text equals or matches the pattern: ids of tests hold brackets, which patterns use too."""
    return any(text == pattern or fnmatchcase(text, pattern) for text in texts)


def label_of(path: Path) -> tuple[str, str]:
    """Return test and name of the check in a file; the file itself if it lacks them, which other code reports."""
    try:
        label: Any = read(path).meta["check"]
        return str(label["test"]), str(label["name"])
    except (DumpError, LookupError, TypeError):
        return path.name, ""


def _tensors(path: Path) -> dict[str, Array]:
    try:
        return read(path).tensors
    except DumpError as error:
        raise GoldenError(str(error)) from None


def _stored(store: GoldenStore, name: str) -> Stamp | None:
    return stamp_of(store.root / name) if (store.root / name).exists() else None


def _note(path: Path) -> Path:
    return path.with_name(path.name + _NOTE)


def _json(stamp: Stamp | None) -> dict[str, Any] | None:
    return None if stamp is None else dict(vars(stamp))
