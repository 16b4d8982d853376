"""Differences between two recordings of a case: quantity by quantity, then tolerances and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.arrays import Array
from regress.golden import truth as truths
from regress.golden.manifest import Manifest
from regress.golden.names import where_order
from regress.golden.tolerance import ToleranceEntry


@dataclass(frozen=True)
class Side:
    """One recording: its manifest (None: nothing is recorded), and the folders in which its truth files may lie."""

    manifest: Manifest | None
    roots: Sequence[Path]


@dataclass(frozen=True)
class Change:
    """Change of one quantity at one update.

    Attributes:
        status: `new`, `removed` or `changed`.
        tensors, changed: tensors of either side, and those that differ.
        worst: the tensor that differs most, in relation to its largest old value.
        max_error, relative: its largest `|new - old|`, and that over its largest `|old|`; 0 where no values of the
            same type and shape differ.
        detail: tensors that came, went, or are of another type or shape.
    """

    where: str
    quantity: str
    status: str
    tensors: int
    changed: int
    worst: str = ""
    max_error: float = 0.0
    relative: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class ToleranceChange:
    """Tolerance that was added, removed or changed.

    Attributes:
        tensor: pattern of the tensors that it is for; empty for all others of the quantity.
        old, new: the bounds in words; `none` where there was or will be none.
        factor: factor by which the new bound is wider; None where the two are not of one kind.
        reason: reason of the new bound.
    """

    quantity: str
    tensor: str
    precision: str
    old: str
    new: str
    factor: float | None
    reason: str


@dataclass(frozen=True)
class Difference:
    """All differences: quantities in the order of updates, tolerances, and a line for each input."""

    changes: list[Change]
    tolerances: list[ToleranceChange]
    inputs: list[str]

    def __bool__(self) -> bool:
        return bool(self.changes or self.tolerances or self.inputs)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return asdict(self)


def compare(old: Side, new: Side) -> Difference:
    """Compare two recordings; only quantities whose files differ are read, and every byte of them is verified.

    Raises `GoldenError` naming a file that is missing or damaged.
    """
    before, after = old.manifest or Manifest(), new.manifest or Manifest()
    return Difference(
        list(_changes(old, new, before, after)),
        list(_tolerances(before, after)),
        list(_inputs(before, after)),
    )


def _changes(old: Side, new: Side, before: Manifest, after: Manifest) -> Iterator[Change]:
    for where in sorted({*before.truth, *after.truth}, key=where_order):
        before_rows, after_rows = before.truth.get(where, {}), after.truth.get(where, {})
        for quantity in sorted({*before_rows, *after_rows}):
            a, b = before_rows.get(quantity), after_rows.get(quantity)
            if a is None or b is None:
                entry, status = (b, "new") if a is None else (a, "removed")
                assert entry is not None
                yield Change(where, quantity, status, len(entry.tensors), len(entry.tensors))
            elif a.stamp != b.stamp:
                first, second = truths.read(old.roots, a, quantity), truths.read(new.roots, b, quantity)
                yield change_of(where, quantity, first, second)


def change_of(where: str, quantity: str, old: Mapping[str, Array], new: Mapping[str, Array]) -> Change:
    """Describe the changes in the tensors of one quantity."""
    details = [f"{name} removed" for name in old.keys() - new.keys()]
    details += [f"{name} new" for name in new.keys() - old.keys()]
    changed, worst, error, relative = len(details), "", 0.0, 0.0
    for name in sorted(old.keys() & new.keys()):
        a, b = old[name], new[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            details.append(f"{name} {_kind(b)}, was {_kind(a)}")
            changed += 1
        elif a.tobytes() != b.tobytes():
            changed += 1
            found = _errors(a, b)
            if not worst or found[1] > relative:
                worst, (error, relative) = name, found
    tensors = len(old.keys() | new.keys())
    return Change(
        where, quantity, "changed", tensors, changed, worst, error, relative, "; ".join(sorted(details))
    )


def _errors(old: Array, new: Array) -> tuple[float, float]:
    a, b = old.astype(np.float64), new.astype(np.float64)
    with np.errstate(over="ignore"):  # opposite values near the end of the range: infinity is the answer
        error = float(np.abs(b - a).max())
    scale = float(np.abs(a).max())
    return error, error / scale if scale else (np.inf if error else 0.0)


def _kind(array: Array) -> str:
    return f"{array.dtype.name} {'x'.join(map(str, array.shape)) or 'scalar'}"


def _tolerances(before: Manifest, after: Manifest) -> Iterator[ToleranceChange]:
    for quantity in sorted({*before.tolerances, *after.tolerances}):
        before_rows, after_rows = before.tolerances.get(quantity, {}), after.tolerances.get(quantity, {})
        for precision in sorted({*before_rows, *after_rows}):
            old, new = _flat(before_rows.get(precision)), _flat(after_rows.get(precision))
            for tensor in dict.fromkeys([*old, *new]):
                if old.get(tensor) != new.get(tensor):
                    yield _tolerance_change(quantity, tensor, precision, old.get(tensor), new.get(tensor))


def _flat(entry: ToleranceEntry | None) -> dict[str, ToleranceEntry]:
    """Return an entry and those of its tensors, by pattern."""
    return {} if entry is None else {"": replace(entry, tensors={}), **entry.tensors}


def _tolerance_change(
    quantity: str, tensor: str, precision: str, old: ToleranceEntry | None, new: ToleranceEntry | None
) -> ToleranceChange:
    factor = None
    if old is not None and new is not None:
        pairs = ((old.relative or 0.0, new.relative or 0.0), (old.absolute, new.absolute))
        factors = {b / a for a, b in pairs if a and b}
        factor = factors.pop() if len(factors) == 1 and all(bool(a) == bool(b) for a, b in pairs) else None
    before, after = ("none" if entry is None else entry.bound for entry in (old, new))
    return ToleranceChange(
        quantity, tensor, precision, before, after, factor, "" if new is None else new.reason
    )


def _inputs(before: Manifest, after: Manifest) -> Iterator[str]:
    for path in sorted({*before.inputs, *after.inputs}):
        a, b = before.inputs.get(path), after.inputs.get(path)
        if a != b:
            yield f"input {path} {'is new' if a is None else 'was removed' if b is None else 'changed'}"
