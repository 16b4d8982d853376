"""Headroom of passing comparisons: the closest call of every quantity and precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from regress.compare.quantities import order_of
from regress.report.call import Call
from regress.report.numbers import short


class Matrix(NamedTuple):
    """Headroom of several variants: a table for people, and a tree for programs."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    tree: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Closest:
    """All comparisons of one quantity in one precision.

    Attributes:
        call: the passing one with the least headroom, None if all failed.
        passed, failed, elements: number of comparisons, and of elements in them.
    """

    quantity: str
    precision: str
    call: Call | None
    passed: int
    failed: int
    elements: int

    @property
    def multiple(self) -> float:
        """Largest passing error in multiples of its tolerance; 0 for equal values."""
        return 0.0 if self.call is None else self.call.verdict.multiple

    @property
    def headroom(self) -> float:
        """Factor by which the error could have been larger; infinite for equal values."""
        return 1 / self.multiple if self.multiple else math.inf

    @property
    def room(self) -> str:
        """Headroom in words."""
        return "equal" if math.isinf(self.headroom) else f"{short(self.headroom)} x"

    def cells(self) -> tuple[str, ...]:
        """Return a row of `COLUMNS`."""
        counts = (str(self.passed), str(self.failed), str(self.elements))
        if self.call is None:
            return (self.quantity, self.precision, "", "", "", "", *counts, "")
        verdict = self.call.verdict
        figures = (short(self.multiple), self.room, short(verdict.max_error), short(verdict.tolerance))
        return (self.quantity, self.precision, *figures, *counts, self.call.label)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict of strict JSON values; an infinite headroom is null."""
        call = None
        if self.call is not None:
            verdict = self.call.verdict
            call = {
                "where": self.call.where,
                "place": str(verdict.place),
                "name": verdict.name,
                "multiple": verdict.multiple,
                "max_error": verdict.max_error,
                "relative": _finite(verdict.relative),
                "tolerance": _finite(verdict.tolerance),
                "worst": None if verdict.worst is None else verdict.worst.where,
            }
        return {
            "quantity": self.quantity,
            "precision": self.precision,
            "headroom": _finite(self.headroom),
            "closest": call,
            "passed": self.passed,
            "failed": self.failed,
            "elements": self.elements,
        }


COLUMNS = (
    *("quantity", "precision", "x tolerance", "headroom", "max error", "tolerance"),
    *("passed", "failed", "elements", "closest call"),
)
WORDS = ("quantity", "precision", "closest call")


def closest_calls(calls: Iterable[Call]) -> list[Closest]:
    """Return one row for each quantity and precision, in the order of computation."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.verdict.quantity, call.precision), []).append(call)
    rows = [_closest(*key, group) for key, group in groups.items()]
    return sorted(rows, key=lambda row: (order_of(row.quantity), row.quantity, row.precision))


def _closest(quantity: str, precision: str, calls: Sequence[Call]) -> Closest:
    passed = [call for call in calls if call.verdict.ok]
    # ties go to the first name, whatever order workers report in
    nearest = min(passed, key=lambda call: (-call.verdict.multiple, call.label), default=None)
    elements = sum(call.verdict.count for call in calls)
    return Closest(quantity, precision, nearest, len(passed), len(calls) - len(passed), elements)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
