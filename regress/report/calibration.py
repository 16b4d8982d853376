"""Results of a calibration: a table for the terminal, a plot, and JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from regress.dump.location import Location
from regress.dump.outputs import write_outputs
from regress.report.numbers import short

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_NAMED = 3

JSON_NAME, HTML_NAME = "calibration.json", "calibration.html"


@dataclass(frozen=True)
class Row:
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


def table(case: str, rows: Sequence[Row]) -> Table:
    """Return the table for the terminal; columns without any measurement are left out."""
    proved = any(row.closest is not None or row.fault is not None for row in rows)
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left")
    found.title = f"{case}: sizes are relative to the largest golden value"
    for title in ("quantity", "precision"):
        found.add_column(title, no_wrap=True)
    found.add_column("noise floor", justify="right", no_wrap=True)
    found.add_column("which is")
    found.add_column("tolerance", justify="right", no_wrap=True)
    if proved:
        found.add_column("healthy spread", justify="right", no_wrap=True)
        found.add_column("of tolerance", justify="right", no_wrap=True)
        found.add_column("smallest known fault", overflow="fold")
        found.add_column("x tolerance", justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*(Text(cell) for cell in _cells(row, proved)))
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each quantity with tensors that have a bound of their own."""
    found = []
    for row in rows:
        named = [f"{pattern} {short(bound)}" for pattern, bound in row.ill.items() if pattern != "*"][:_NAMED]
        more = f" and {len(row.ill) - _NAMED} more" if len(row.ill) > _NAMED else ""
        if row.ill:
            listed = f": {', '.join(named)}{more}" if named else f": {short(row.ill['*'])}"
            found.append(f"ill-conditioned, so bounded absolutely: {row.quantity} in {row.precision}{listed}")
    return found


def _cells(row: Row, proved: bool) -> list[str]:
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


def write(folder: Location, case: str, rows: Sequence[Row]) -> list[Location]:
    """Write ``calibration.json`` and ``calibration.html``, which needs no network; return their paths."""
    tree = {"schema_version": 1, "case": case, "rows": [_strict(asdict(row)) for row in rows]}
    page = figure(case, rows).to_html(include_plotlyjs=True, full_html=True)
    texts = {JSON_NAME: json.dumps(tree, indent=1, allow_nan=False) + "\n", HTML_NAME: page}
    return write_outputs(folder, texts)


def _strict(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities by null for JSON: a fault that no tolerance allows has no multiple."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in tree.items()
    }


_MARKS = (
    ("healthy spread", "circle", "#2a7f3f"),
    ("noise floor", "line-ns-open", "#555555"),
    ("tolerance", "diamond", "#1f4e9c"),
    ("smallest known fault", "x", "#b3261e"),
)


def figure(case: str, rows: Sequence[Row]) -> Figure:
    """Draw one panel per precision: healthy spread, floor, tolerance and smallest fault of each quantity,
    on one scale.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    precisions = list(dict.fromkeys(row.precision for row in rows))
    found = make_subplots(cols=len(precisions), shared_yaxes=True, subplot_titles=precisions)
    for column, precision in enumerate(precisions, 1):
        own = [row for row in rows if row.precision == precision]
        for name, symbol, color in _MARKS:
            points = [(size, row) for row in own if (size := _sizes(row)[name]) is not None]
            found.add_trace(
                Scatter(
                    x=[size for size, _ in points],
                    y=[row.quantity for _, row in points],
                    mode="markers",
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                    text=[_told(name, row) for _, row in points],
                    hovertemplate="%{y}: %{x:.2e}<br>%{text}<extra></extra>",
                    marker={"symbol": symbol, "color": color, "size": 11, "line": {"width": 2}},
                ),
                row=1,
                col=column,
            )
    found.update_xaxes(type="log", exponentformat="power", title="relative to the largest golden value")
    found.update_yaxes(autorange="reversed")
    found.update_layout(
        title=f"{case}: what correct computations differ by, what is tolerated, and what faults differ by",
        template="plotly_white",
        height=220 + 26 * len({row.quantity for row in rows}),
        legend={"orientation": "h", "y": -0.15},
    )
    return found


def _sizes(row: Row) -> dict[str, float | None]:
    fault = None
    if row.multiple is not None and row.tolerance is not None and math.isfinite(row.multiple):
        fault = row.multiple * row.tolerance
    values = (row.spread, row.floor, row.tolerance, fault)
    return {
        name: value if value is not None and 0 < value < math.inf else None
        for (name, *_), value in zip(_MARKS, values, strict=True)
    }


def _told(mark: str, row: Row) -> str:
    return {
        "healthy spread": row.variant or "",
        "noise floor": row.source,
        "tolerance": "; ".join(f"{pattern} apart: {short(bound)}" for pattern, bound in row.ill.items()),
        "smallest known fault": f"{row.fault}, {short(row.multiple or 0.0)} x tolerance",
    }[mark]
