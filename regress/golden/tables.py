"""Golden cases, their differences and pending updates, as rows for programs and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regress.errors import GoldenError
from regress.golden.case import GoldenCase
from regress.golden.checks import read_check, stored_checks
from regress.golden.difference import Change, Difference, ToleranceChange
from regress.golden.entries import TensorEntry
from regress.golden.pending import pending_names
from regress.golden.pending_checks import matches
from regress.golden.store import GoldenStore
from regress.golden.tree import CONTAINERS, describe
from regress.printed import echo

Row = dict[str, Any]

_TOLD = ("dtype", "shape", "min", "max", "mean")
_LONG = (
    "tensor",
    "worst",
    "detail",
    "reason",
    "test",
    "name",
    "value",
    "text",
    "why",
)  # columns that a narrow terminal may break
_WIDE = 1000  # where there is no terminal nothing is cut or wrapped, so that lines can be searched


def echo_table(rows: Sequence[Row]) -> None:
    """Print rows under the keys of the first; columns without any value are left out."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    for key in keys:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        long = key in _LONG
        table.add_column(key, justify="right" if numeric else "left", no_wrap=not long, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in keys))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console = Console(highlight=False, width=_WIDE)
    with console.capture() as capture:
        console.print(table)
    echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def case_rows(store: GoldenStore) -> list[Row]:
    """Return one row for each case; for a damaged one, with its problem."""
    pending = pending_names(store)
    rows = []
    for name in store.names():
        try:
            rows.append(_case_row(store.case(name, allow_changed_inputs=True), name in pending))
        except GoldenError as error:
            nothing = dict.fromkeys(("updates", "quantities", "tensors", "bytes"))
            rows.append({"case": name, **nothing, "state": "damaged", "reason": str(error)})
    return rows


def _case_row(case: GoldenCase, pending: bool) -> Row:
    truth = {} if case.manifest is None else case.manifest.truth
    entries = [entry for row in truth.values() for entry in row.values()]
    stamps = [] if case.manifest is None else case.manifest.inputs.values()
    return {
        "case": case.name,
        "updates": len(truth),
        "quantities": len({quantity for row in truth.values() for quantity in row}),
        "tensors": sum(len(entry.tensors) for entry in entries),
        "bytes": sum(entry.stamp.size for entry in entries) + sum(stamp.size for stamp in stamps),
        "state": "pending update" if pending else "recorded" if truth else "not recorded",
        "reason": " ".join(case.reason.split()),
    }


def quantity_rows(case: GoldenCase) -> list[Row]:
    """Return one row for each quantity of each update."""
    rows = []
    for where in case.wheres():
        assert case.manifest is not None
        for quantity, entry in sorted(case.manifest.truth[where].items()):
            tensors = entry.tensors.values()
            rows.append(
                {
                    "update": where,
                    "quantity": quantity,
                    "tensors": len(entry.tensors),
                    "dtypes": "+".join(sorted({tensor.dtype for tensor in tensors})),
                    "bytes": entry.stamp.size,
                    "absmax": max((tensor.absmax or 0.0 for tensor in tensors), default=0.0),
                }
            )
    return rows


def tensor_rows(case: GoldenCase, quantity: str) -> list[Row]:
    """Return one row for each tensor of a quantity."""
    rows = []
    for where in case.wheres():
        assert case.manifest is not None
        entry = case.manifest.truth[where].get(quantity)
        for name, tensor in sorted(entry.tensors.items()) if entry is not None else ():
            told = {key: value for key, value in vars(tensor).items() if key != "sha256"}
            rows.append({"update": where, "tensor": name, **told})
    return rows


def tolerance_rows(case: GoldenCase) -> list[Row]:
    """Return one row for each tolerance; those of single tensors follow that of their quantity."""
    tolerances = {} if case.manifest is None else case.manifest.tolerances
    return [
        {
            "quantity": quantity,
            "tensor": pattern,
            "precision": precision,
            "relative": own.relative,
            "absolute": own.absolute,
            "reason": own.reason,
        }
        for quantity, row in sorted(tolerances.items())
        for precision, entry in sorted(row.items())
        for pattern, own in ((None, entry), *entry.tensors.items())
    ]


def check_rows(store: GoldenStore, pattern: str | None) -> list[Row]:
    """Return one row for each tensor or other leaf of the stored checks; `pattern` matches tests, names or files."""
    rows = []
    for path in stored_checks(store.root):
        check = read_check(store.root, path)
        if check is None or not (pattern is None or matches(pattern, (path, check.test, check.name))):
            continue
        for leaf, node in check.value.nodes.items():
            if node[0] in CONTAINERS:
                continue
            array = check.value.tensors.get(leaf)
            told = dict.fromkeys(_TOLD) if array is None else vars(TensorEntry.of(array))
            rows.append(
                {
                    "test": check.test,
                    "name": check.name,
                    "value": leaf,
                    **{key: told[key] for key in _TOLD},
                    "text": describe(node) if array is None else None,
                    "rtol": check.rtol or None,
                    "atol": check.atol or None,
                    "why": check.why or None,
                }
            )
    return rows


def change_row(change: Change) -> Row:
    """Return a changed quantity as one row."""
    compared = bool(change.worst)
    return {
        "update": change.where,
        "quantity": change.quantity,
        "status": change.status,
        "tensors": f"{change.changed}/{change.tensors}",
        "max change": change.max_error if compared else None,
        "relative": change.relative if compared else None,
        "worst": change.worst or None,
        "detail": change.detail or None,
    }


def tolerance_change_row(change: ToleranceChange) -> Row:
    """Return a changed tolerance as one row."""
    return {
        "tolerance": change.quantity,
        "tensor": change.tensor or None,
        "precision": change.precision,
        "old": change.old,
        "new": change.new,
        "times": change.factor,
        "reason": change.reason or None,
    }


def echo_difference(found: Difference) -> None:
    """Print the differences: a table of the quantities, one of the tolerances, a line for each input."""
    echo_table([change_row(change) for change in found.changes])
    echo_table([tolerance_change_row(change) for change in found.tolerances])
    for line in found.inputs:
        echo(line)
