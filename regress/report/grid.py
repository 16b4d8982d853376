"""Headroom of every variant, quantity by quantity: a run of many replays on one page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from regress.compare.quantities import QUANTITIES
from regress.report.call import Call
from regress.report.headroom import Closest, Matrix, closest_calls
from regress.report.numbers import short

STAGES: Mapping[str, tuple[str, ...]] = {
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
class Row:
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
        """Return the least headroom among some quantities, or the number of their failed comparisons."""
        found = [self.cells[name] for name in quantities if name in self.cells]
        if not found:
            return ""
        if failed := sum(cell.failed for cell in found):
            return f"{failed} failed"
        return _room(min(cell.headroom for cell in found))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict of strict JSON values."""
        cells = {name: cell.to_json() for name, cell in self.cells.items()}
        return {"variant": self.name, "replays": self.replays, "errors": [*self.errors], "quantities": cells}


def grid(calls: Mapping[str, Sequence[Call]], errors: Mapping[str, str]) -> list[Row]:
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
) -> Row:
    found = closest_calls(call._replace(precision="") for replay in replays for call in calls.get(replay, ()))
    told = tuple(f"{replay}: {errors[replay]}" for replay in replays if replay in errors)
    return Row(name, {cell.quantity: cell for cell in found}, len(replays), told)


def matrix(rows: Sequence[Row]) -> Matrix:
    """Return every variant and quantity, for a report in files."""
    names = quantities_of(rows)
    cells = [(row.name, *(row.cell([name]) for name in names), str(row.replays)) for row in rows]
    return Matrix(("variant", *names, "replays"), cells, [row.to_json() for row in rows])


def by_stage(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return rows of text: name, the least headroom by stage, replays."""
    return [
        (row.name, *(_cell(row, quantities) for quantities in STAGES.values()), str(row.replays))
        for row in rows
    ]


COLUMNS = ("variant", *STAGES, "replays")


def _room(headroom: float) -> str:
    """Return a headroom in few characters."""
    if math.isinf(headroom):
        return "equal"
    return f"{headroom:.0f} x" if 100 <= headroom < 100_000 else f"{short(headroom)} x"


def _cell(row: Row, quantities: Iterable[str]) -> str:
    return row.cell(quantities) or ("not run" if row.errors else "")


def quantities_of(rows: Sequence[Row]) -> list[str]:
    """Return the quantities that any row has, in the order of computation."""
    known = [quantity.name for quantity in QUANTITIES]
    found = {name for row in rows for name in row.cells}
    return [*(name for name in known if name in found), *sorted(found - {*known})]


def render(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal: headroom by stage; ``12 x``: the error could have been twelve times
    as large.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=True)
    for row, cells in zip(rows, by_stage(rows), strict=True):
        bad = bool(row.failed or row.errors)
        table.add_row(
            Text(cells[0], "bold red" if bad else ""), *(Text(cell, _style(cell)) for cell in cells[1:])
        )
    return table


def _style(cell: str) -> str:
    return "bold red" if cell.endswith("failed") or cell == "not run" else ""
