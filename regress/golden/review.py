"""Pending updates for a reviewer: their changes, whether they still apply, and the commands to decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from regress.errors import GoldenError
from regress.golden.difference import Change, ToleranceChange
from regress.golden.names import CHECKS, PENDING
from regress.golden.pending import pending_names, pending_of
from regress.golden.pending_checks import check_change, label_of, pending_checks
from regress.golden.store import GoldenStore
from regress.golden.tables import Row, change_row, echo_table, tolerance_change_row
from regress.printed import echo


@dataclass(frozen=True)
class Review:
    """Pending update of a case, or of the stored checks.

    Attributes:
        case: its name, or `checks`.
        notes: notes of the proposer.
        changes, tolerances: changes of values and of tolerances.
        others: a line for each input that would.
        problem: reason the update cannot be accepted, or None.
        labels: test and name of each stored check, by its file.
    """

    case: str
    notes: Sequence[str] = ()
    changes: Sequence[Change] = ()
    tolerances: Sequence[ToleranceChange] = ()
    others: Sequence[str] = ()
    problem: str | None = None
    labels: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def echo(self) -> None:
        """Print the update, with the commands to decide."""
        echo(f"{self.case}: pending update")
        for note in self.notes:
            echo(f"  {note}")
        echo_table([self._row(change) for change in self.changes])
        echo_table([tolerance_change_row(change) for change in self.tolerances])
        for line in self.others:
            echo(line)
        if self.problem is not None:
            echo(f"cannot be accepted: {self.problem}")
        else:
            echo(f"accept: regress golden accept {self.case} {self._choice}...")
        echo(f"reject: regress golden reject {self.case} {self._choice}...")

    @property
    def _choice(self) -> str:
        return "[TEST or NAME]" if self.case == CHECKS else "[QUANTITY]"

    def _row(self, change: Change) -> Row:
        """Return a line of the table; for a stored check it names the test in place of the file."""
        row = change_row(change)
        if self.case != CHECKS:
            return row
        del row["update"], row["quantity"]
        return {**dict(zip(("test", "name"), self.labels[change.quantity], strict=True)), **row}


def reviews(store: GoldenStore, names: Sequence[str] = ()) -> list[Review]:
    """Return all pending updates, or those of some cases; raises `GoldenError` for a case without one."""
    for name in names:
        if name != CHECKS and name not in pending_names(store):
            pending_of(store, name)
    found = [_case(store, name) for name in pending_names(store) if not names or name in names]
    if not names or CHECKS in names:
        found += _checks(store)
    return found


def _case(store: GoldenStore, name: str) -> Review:
    try:
        pending = pending_of(store, name)
    except GoldenError as error:
        return Review(name, problem=str(error))
    try:
        difference = pending.difference()
    except GoldenError as error:
        return Review(name, pending.notes, problem=str(error))
    return Review(name, pending.notes, difference.changes, difference.tolerances, difference.inputs)


def _checks(store: GoldenStore) -> Iterator[Review]:
    changes, problems = [], []
    for name in pending_checks(store):
        try:
            changes.append(check_change(store, name))
        except GoldenError as error:
            problems.append(str(error))
    if changes or problems:
        labels = {change.quantity: label_of(store.root / PENDING / change.quantity) for change in changes}
        yield Review(CHECKS, changes=changes, problem="; ".join(problems) or None, labels=labels)
