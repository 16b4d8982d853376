"""Headroom of passing comparisons: the closest call of every quantity and precision, and of every variant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regress.compare.quantities import order_of
from regress.report.number_format import short
from regress.report.text_table import Table
from regress.report.verdict_entries import Call


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


def closest_table(rows: Sequence[Closest]) -> Table:
    """Return the table of closest calls."""
    failed = [number for number, row in enumerate(rows) if row.failed]
    return Table(COLUMNS, [row.cells() for row in rows], words=WORDS, bad=failed)


def in_order_of_computation(quantities: Iterable[str]) -> list[str]:
    """Return quantities in the order in which they are computed."""
    return sorted(quantities, key=lambda quantity: (order_of(quantity), quantity))


def _closest(quantity: str, precision: str, calls: Sequence[Call]) -> Closest:
    passed = [call for call in calls if call.verdict.ok]
    # ties go to the first name, whatever order workers report in
    nearest = min(passed, key=lambda call: (-call.verdict.multiple, call.label), default=None)
    elements = sum(call.verdict.count for call in calls)
    return Closest(quantity, precision, nearest, len(passed), len(calls) - len(passed), elements)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


QUANTITY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("trajectory", "coverage", "replicas", "batch_inputs"),
    "weights": ("advantages", "weights", "sampler_weights"),
    "hidden": ("activations",),
    "log-probs": ("log_probs", "old_log_probs", "ref_log_probs", "entropy"),
    "loss": ("kl", "ratio", "policy_loss", "entropy_loss", "token_loss", "loss"),
    "gradient": (
        *("token_gradient", "entropy_gradient", "token_residual", "logit_gradient"),
        *("gradient", "grad_norm"),
    ),
    "update": ("optimizer", "param", "metrics", "step_metrics"),
}
"""Quantities that share a column where there is no room for one each, in the order of computation."""


@dataclass(frozen=True)
class VariantRow:
    """One variant in one precision, over all cases that it was replayed on.

    Attributes:
        name: name of the variant, with its precision.
        cells: quantity -> all comparisons of it.
        replays: number of replays.
        errors: reasons why replays could not be judged.
    """

    name: str
    cells: Mapping[str, Closest]
    replays: int
    errors: tuple[str, ...]

    @property
    def failed(self) -> int:
        """Number of failed comparisons."""
        return sum(cell.failed for cell in self.cells.values())

    def cell(self, quantities: Iterable[str]) -> str:
        """Return the least headroom among some quantities, the number of their failed comparisons, or ``not run``."""
        found = [self.cells[name] for name in quantities if name in self.cells]
        if not found:
            return "not run" if self.errors else ""
        if failed := sum(cell.failed for cell in found):
            return f"{failed} failed"
        return _room(min(cell.headroom for cell in found))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict of strict JSON values."""
        cells = {name: cell.to_json() for name, cell in self.cells.items()}
        return {"variant": self.name, "replays": self.replays, "errors": [*self.errors], "quantities": cells}


def variant_rows(calls: Mapping[str, Sequence[Call]], errors: Mapping[str, str]) -> list[VariantRow]:
    """Return one row for each variant and precision.

    Args:
        calls: calls by replay, ``case/variant``, in the order of the rows.
        errors: replay -> why it could not be judged.
    """
    names: dict[str, list[str]] = {}
    for replay in [*calls, *(replay for replay in errors if replay not in calls)]:
        names.setdefault(replay.partition("/")[2], []).append(replay)
    return [_row(name, replays, calls, errors) for name, replays in names.items()]


def _row(
    name: str, replays: Sequence[str], calls: Mapping[str, Sequence[Call]], errors: Mapping[str, str]
) -> VariantRow:
    found = closest_calls(call._replace(precision="") for replay in replays for call in calls.get(replay, ()))
    failures = tuple(f"{replay}: {errors[replay]}" for replay in replays if replay in errors)
    return VariantRow(name, {cell.quantity: cell for cell in found}, len(replays), failures)


def variants_table(rows: Sequence[VariantRow], groups: Mapping[str, Sequence[str]] | None = None) -> Table:
    """Return the table of the least headroom of each variant; ``12 x``: an error could have been twelve times as large.

    Args:
        groups: quantities that share a column, by its title, such as `QUANTITY_COLUMNS`; by default each has its own.
    """
    if groups is None:
        names = in_order_of_computation({name for row in rows for name in row.cells})
        groups = {name: (name,) for name in names}
    cells = [(row.name, *map(row.cell, groups.values()), str(row.replays)) for row in rows]
    bad = [number for number, row in enumerate(rows) if row.failed or row.errors]
    return Table(("variant", *groups, "replays"), cells, words=("variant",), bad=bad, marked=True)


def _room(headroom: float) -> str:
    """Return a headroom in few characters."""
    if math.isinf(headroom):
        return "equal"
    return f"{headroom:.0f} x" if 100 <= headroom < 100_000 else f"{short(headroom)} x"
