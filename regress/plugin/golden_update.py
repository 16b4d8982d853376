"""End of an update: staged values become golden, or wait beside the cases for review."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from regress.errors import GoldenError, RegressError
from regress.plugin.rows import UpdateRow
from regress.report.numbers import pair

if TYPE_CHECKING:
    from regress.golden.store import GoldenStore
    from regress.golden.transaction import Changes
    from regress.replay.staging import Staged
    from regress.replay.update import Change

_SHOWN = 5


@dataclass(frozen=True)
class Told:
    """Facts from the reports of the session's tests.

    Attributes:
        rows: id of a test, and the row of a check that it has staged.
        failed: ids of the tests that failed in some phase.
    """

    rows: Sequence[tuple[str, UpdateRow]] = ()
    failed: Collection[str] = ()


@dataclass
class Applied:
    """Result of an update.

    Attributes:
        rows: one row for each changed check, and for each changed quantity of a case.
        problems: a sentence for each failure.
        notes: further notes.
    """

    rows: list[UpdateRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def apply_staged(staged_dir: Path, golden_dir: Path, told: Told, *, review: bool) -> Applied:
    """Write what a session staged in one transaction, without the values of tests that failed.

    A case whose update is refused does not prevent the others from being written.
    """
    from regress.golden.transaction import transaction
    from regress.plugin.staged import staged_checks

    found = Applied(notes=list(_dropped(told)))
    try:
        checks, cases = staged_checks(staged_dir, told.failed), _staged_cases(staged_dir)
        if not checks and not cases:
            return found
        _make(golden_dir)
        with transaction(golden_dir) as changes:
            _plan_checks(changes, checks, review=review)
            for name, staged in cases.items():
                problem = _plan_case(changes, name, staged, review=review)
                if problem is None:
                    found.rows += _rows(name, staged, review)
                else:
                    found.problems.append(problem)
    except GoldenError as error:
        return Applied(problems=[f"the update was not completed: {error}"], notes=found.notes)
    found.rows += _check_rows(told, {path for path, data in checks.items() if data})
    return found


def _dropped(told: Told) -> Iterable[str]:
    """Yield a note on the failed tests, which would otherwise have written a golden."""
    tests = sorted({row.owner for test, row in told.rows if test in told.failed})
    if tests:
        more = f" and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
        yield f"new goldens of tests that failed were not written: {', '.join(tests[:_SHOWN])}{more}"


def _staged_cases(staged_dir: Path) -> dict[str, Staged]:
    """Return the cases for which an update was prepared and not refused; without any, torch is not needed here."""
    if not any(staged_dir.glob("*.json")):
        return {}
    from regress.replay.staging import read_staged, staged_names

    found = {name: read_staged(staged_dir, name) for name in staged_names(staged_dir)}
    return {name: staged for name, staged in found.items() if staged.case is not None}


def _make(golden_dir: Path) -> None:
    from regress.golden.files import unwritable

    try:
        golden_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(golden_dir, error) from error


def _plan_checks(changes: Changes, checks: Mapping[str, bytes], *, review: bool) -> None:
    """Add to a transaction the new files of checks, and drop earlier proposals for the checks of this session."""
    from regress.golden.pending_checks import discard_check, plan_check
    from regress.golden.store import GoldenStore

    store = GoldenStore(changes.root)
    for path, data in checks.items():
        if data and review:
            plan_check(changes, store, path, [data])
            continue
        discard_check(changes, store, path)
        if data:
            changes.write(store.root / path, [data])


def _plan_case(changes: Changes, name: str, staged: Staged, *, review: bool) -> str | None:
    """Add the update of a case to a transaction; if it is refused, add nothing and return a sentence."""
    from regress.golden.commit import plan_commit
    from regress.golden.pending import plan_proposal
    from regress.golden.store import GoldenStore
    from regress.golden.transaction import Changes
    from regress.golden.update import Update
    from regress.replay.staging import changed_truth

    assert staged.case is not None
    assert staged.case.manifest is not None
    own, store = Changes(changes.root), GoldenStore(changes.root)
    update = Update(staged.case.manifest.provenance, changed_truth(staged))
    try:
        if review and staged.changes:
            plan_proposal(own, store, name, update, outdated=staged.looked)
        else:
            _withdraw(own, store, name, staged)
        if staged.changes and not review:
            plan_commit(own, store.folder(name), update)
    except RegressError as error:
        return f"the update of {name} was not written: {error}"
    changes.add(own)
    return None


def _withdraw(changes: Changes, store: GoldenStore, name: str, staged: Staged) -> None:
    """Drop an earlier session's proposals for the items of this one: their values are outdated, or already right."""
    from regress.golden.manifest import read_manifest
    from regress.golden.pending import pending_names, pending_of, plan_rejection
    from regress.golden.selection import items

    if name not in pending_names(store):
        return
    pending, base = pending_of(store, name), read_manifest(store.folder(name))
    if pending.fits(base) and (outdated := items(base, pending.manifest) & staged.looked):
        plan_rejection(changes, pending, outdated)


def _check_rows(told: Told, written: Collection[str]) -> Iterable[UpdateRow]:
    """Return the rows of the checks that were written; the last run of a test counts."""
    from regress.golden.checks import check_path

    last = {check_path(row.owner, row.name): row for test, row in told.rows if test not in told.failed}
    return (row for path, row in last.items() if path in written)


def _rows(case: str, staged: Staged, pending: bool) -> Iterable[UpdateRow]:
    grouped: dict[str, list[Change]] = defaultdict(list)
    for change in staged.changes:
        grouped[change.quantity].append(change)
    for quantity, found in grouped.items():
        worst = max(found, key=lambda change: change.multiple)
        old, new = ("", "") if worst.old is None or worst.new is None else pair(worst.old, worst.new)
        yield UpdateRow(
            case,
            quantity,
            ", ".join(dict.fromkeys(str(change.status) for change in found)),
            len(found),
            staged.compared.get(quantity, len(found)),
            max(change.max_error for change in found),
            worst.multiple,
            old,
            new,
            pending,
        )
