"""Results of a calibration and of its validation: tables, a page, and JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regress.dump.command_outputs import write_outputs
from regress.dump.dump_location import Location
from regress.report.headroom import in_order_of_computation
from regress.report.html_pages import Chart, Line, Page, Panel, script_json
from regress.report.number_format import short
from regress.report.text_table import Table

_NAMED = 3

JSON_NAME, HTML_NAME = "calibration.json", "calibration.html"


@dataclass(frozen=True)
class CalibrationRow:
    """One quantity in one precision; sizes are relative to the largest golden value.

    Attributes:
        floor, source: the noise floor, and which of the three it is; None where no tensor shares a bound.
        tolerance: the relative bound; None where all tensors have absolute ones.
        ill: absolute bounds of ill-conditioned tensors, by patterns of their names.
        spread, closest, variant: the held-out healthy variant that comes closest to failing: its largest error, also in
            multiples of the tolerance.
        fault, multiple: the smallest known fault that begins in this quantity, in multiples of the tolerance.
    """

    quantity: str
    precision: str
    floor: float | None
    source: str
    tolerance: float | None
    ill: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None
    closest: float | None = None
    variant: str | None = None
    fault: str | None = None
    multiple: float | None = None


_COLUMNS = ("quantity", "precision", "noise floor", "which is", "tolerance")
_PROOF = ("healthy spread", "of tolerance", "smallest known fault", "x tolerance")


def table(case: str, rows: Sequence[CalibrationRow]) -> Table:
    """Return the table; columns without any measurement are left out."""
    proved = any(row.closest is not None or row.fault is not None for row in rows)
    columns = (*_COLUMNS, *_PROOF) if proved else _COLUMNS
    cells = [_cells(row, proved) for row in rows]
    words = ("quantity", "precision", "which is", "smallest known fault")
    return Table(columns, cells, f"{case}: {_SCALE}", words=words, folded=words[2:])


def notes(rows: Sequence[CalibrationRow]) -> list[str]:
    """Return a sentence for each quantity with tensors that have a bound of their own."""
    found = []
    for row in rows:
        named = [f"{pattern} {short(bound)}" for pattern, bound in row.ill.items() if pattern != "*"][:_NAMED]
        more = f" and {len(row.ill) - _NAMED} more" if len(row.ill) > _NAMED else ""
        if row.ill:
            listed = f": {', '.join(named)}{more}" if named else f": {short(row.ill['*'])}"
            found.append(f"ill-conditioned, so bounded absolutely: {row.quantity} in {row.precision}{listed}")
    return found


def _cells(row: CalibrationRow, proved: bool) -> list[str]:
    bound = _size(row.tolerance) or "absolute"
    bound += f", {len(row.ill)} apart" if row.ill and row.tolerance else ""
    cells = [row.quantity, row.precision, _size(row.floor) or "-", row.source if row.floor else "-", bound]
    if proved:
        closest = "-" if row.closest is None else f"{row.closest:.0%}"
        multiple = "-" if row.multiple is None else short(row.multiple)
        cells += [_size(row.spread) or "-", closest, row.fault or "-", multiple]
    return cells


def _size(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def write(folder: Location, case: str, rows: Sequence[CalibrationRow]) -> list[Location]:
    """Write ``calibration.json`` and ``calibration.html``, which needs no network; return their paths."""
    tree = {"schema_version": 1, "case": case, "rows": [_strict(asdict(row)) for row in rows]}
    texts = {JSON_NAME: json.dumps(tree, indent=1, allow_nan=False) + "\n", HTML_NAME: to_html(case, rows)}
    return write_outputs(folder, texts)


def _strict(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities by null for JSON: a fault that no tolerance allows has no multiple."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in tree.items()
    }


_MARKS = (
    ("healthy spread", "●", "var(--good)"),
    ("noise floor", "|", "var(--quiet)"),
    ("tolerance", "◆", "var(--ink)"),
    ("smallest known fault", "✕", "var(--bad)"),
)
_SCALE = "sizes are relative to the largest golden value"


def to_html(case: str, rows: Sequence[CalibrationRow]) -> str:
    """Return the page: each precision has a chart, on one scale; all have a table."""
    charts = charts_of(rows)
    panels = [
        Panel("", "charts", charts=[Chart(f"chart-{n}", one["title"]) for n, one in enumerate(charts)]),
        Panel("Sizes", "sizes", lines=[*map(Line, notes(rows))], tables=[table(case, rows)]),
    ]
    summary = "what correct computations differ by, what is tolerated, and what faults differ by"
    program = ("plot.js", "calibration.js")
    return Page(case, summary, panels=panels, program=program, data=script_json(charts)).html()


def charts_of(rows: Sequence[CalibrationRow]) -> list[dict[str, Any]]:
    """Return a chart for each precision as ``plot.js`` draws it: spread, floor, tolerance and smallest fault of each
    quantity, as powers of ten.
    """
    quantities = [*dict.fromkeys(row.quantity for row in rows)]
    charts: dict[str, list[list[tuple[float, int, str]]]] = {}
    for row in rows:
        marks = charts.setdefault(row.precision, [[] for _ in _MARKS])
        for (name, *_), points, (size, label) in zip(_MARKS, marks, _sizes(row), strict=True):
            if size is not None and 0 < size < math.inf:
                words = f"{row.quantity}: {name} {size:.2e}\n{label}".strip()
                points.append((math.log10(size), -quantities.index(row.quantity), words))
    powers = [x for marks in charts.values() for points in marks for x, *_ in points]
    low, high = math.floor(min(powers, default=-1)), math.ceil(max(powers, default=0))
    shared = {
        "height": 70 + 26 * len(quantities),
        "x": {
            "title": _SCALE,
            "range": [low - 0.3, high + 0.3],
            "ticks": [[power, f"1e{power}"] for power in range(low, high + 1)],
        },
        "y": {
            "range": [0.4 - len(quantities), 0.6],
            "ticks": [[-n, name] for n, name in enumerate(quantities)],
        },
    }
    return [
        {
            "title": precision,
            "lines": [_line(*mark, points) for mark, points in zip(_MARKS, marks, strict=True)],
        }
        | shared
        for precision, marks in charts.items()
    ]


def _line(name: str, symbol: str, color: str, points: Sequence[tuple[float, int, str]]) -> dict[str, Any]:
    return {"name": name, "symbol": symbol, "color": color, "points": points}


def _sizes(row: CalibrationRow) -> tuple[tuple[float | None, str], ...]:
    """Return the size of each of `_MARKS`, and its words."""
    fault = None if row.multiple is None or row.tolerance is None else row.multiple * row.tolerance
    return (
        (row.spread, row.variant or ""),
        (row.floor, row.source),
        (row.tolerance, "; ".join(f"{pattern} apart: {short(bound)}" for pattern, bound in row.ill.items())),
        (fault, f"{row.fault}, {short(row.multiple or 0.0)} x tolerance"),
    )


@dataclass(frozen=True)
class Healthy:
    """One quantity of one healthy replay; ``multiple`` is that of its tolerance."""

    seed: int
    name: str
    precision: str
    quantity: str
    multiple: float


@dataclass(frozen=True)
class Faulty:
    """One fault under one seed: whether it changes anything beyond rounding, whether it fails, and its size."""

    seed: int
    name: str
    exercised: bool
    caught: bool
    multiple: float
    worst: str


def headroom_table(rows: Sequence[Healthy]) -> Table:
    """Return a row for each quantity, and one for all: the largest multiple in each precision, with its replay."""
    precisions = list(dict.fromkeys(row.precision for row in rows))
    table = []
    for quantity in [*in_order_of_computation({row.quantity for row in rows}), None]:
        cells = ["any" if quantity is None else quantity]
        for precision in precisions:
            own = [row for row in rows if row.precision == precision and quantity in (None, row.quantity)]
            widest = max(own, key=lambda row: row.multiple)
            cells += [short(widest.multiple), f"{widest.name}, seed {widest.seed}" if widest.multiple else ""]
        table.append(cells)
    columns = ("quantity", *(name for precision in precisions for name in (precision, "in")))
    return Table(columns, table, words=("quantity", "in"))


def faults_table(rows: Iterable[Faulty]) -> Table:
    """Return a row for each fault: the seeds under which it changes anything, those in which it fails, and its size."""
    by_name: dict[str, list[Faulty]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    table = []
    for name, own in by_name.items():
        hit = sorted((row for row in own if row.exercised), key=lambda row: row.multiple)
        caught = str(sum(row.caught for row in hit))
        ends = (short(hit[0].multiple), short(hit[-1].multiple), hit[0].worst) if hit else ("-", "-", "")
        table.append((name, str(len(own)), str(len(hit)), caught, *ends))
    where = "where, in the smallest"
    columns = ("fault", "seeds", "exercised", "caught", "smallest multiple", "largest", where)
    return Table(columns, table, words=("fault", where), folded=(where,))
