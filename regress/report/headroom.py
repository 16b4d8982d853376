"""How close passing comparisons came to failing: the closest call of every quantity and precision."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regress.compare.quantities import order_of
from regress.compare.verdict import Verdict
from regress.dump.files import write_atomically
from regress.report.numbers import short
from regress.report.text import named, placed

JSON_NAME, HTML_NAME = "headroom.json", "index.html"


class Call(NamedTuple):
    """A verdict and where it was given: a test, or a case and variant; ``precision`` may be empty."""

    where: str
    precision: str
    verdict: Verdict


class Matrix(NamedTuple):
    """Headroom of several variants: a table for people, a tree for programs, and why replays could not be judged."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    tree: Sequence[Mapping[str, Any]]
    errors: Sequence[str]


@dataclass(frozen=True)
class Closest:
    """All comparisons of one quantity in one precision.

    Attributes:
        call: the passing one with the least headroom, None if all failed.
        passed, failed, elements: how many comparisons, and elements in them.
    """

    quantity: str
    precision: str
    call: Call | None
    passed: int
    failed: int
    elements: int

    @property
    def multiple(self) -> float:
        """The largest passing error in multiples of its tolerance; 0 for equal values."""
        return 0.0 if self.call is None else self.call.verdict.multiple

    @property
    def headroom(self) -> float:
        """How many times larger the error could have been; infinite for equal values."""
        return 1 / self.multiple if self.multiple else math.inf

    @property
    def room(self) -> str:
        """The headroom in words."""
        return "equal" if math.isinf(self.headroom) else f"{short(self.headroom)} x"

    def cells(self) -> tuple[str, ...]:
        """As a row of `COLUMNS`."""
        counts = (str(self.passed), str(self.failed), str(self.elements))
        if self.call is None:
            return (self.quantity, self.precision, "", "", "", "", *counts, "")
        verdict = self.call.verdict
        figures = (short(self.multiple), self.room, short(verdict.max_error), short(verdict.tolerance))
        return (self.quantity, self.precision, *figures, *counts, _place(self.call))

    def to_json(self) -> dict[str, Any]:
        """A plain dict of strict JSON values; an infinite headroom is null."""
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
_WORDS = ("quantity", "precision", "closest call")


def closest_calls(calls: Iterable[Call]) -> list[Closest]:
    """One row for each quantity and precision, in the order of computation."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.verdict.quantity, call.precision), []).append(call)
    rows = [_closest(*key, group) for key, group in groups.items()]
    return sorted(rows, key=lambda row: (order_of(row.quantity), row.quantity, row.precision))


def _closest(quantity: str, precision: str, calls: Sequence[Call]) -> Closest:
    passed = [call for call in calls if call.verdict.ok]
    # of several equally close ones the first by name, whatever order workers report in
    nearest = min(passed, key=lambda call: (-call.verdict.multiple, _place(call)), default=None)
    elements = sum(call.verdict.count for call in calls)
    return Closest(quantity, precision, nearest, len(passed), len(calls) - len(passed), elements)


def table(rows: Sequence[Closest], width: int = 120) -> str:
    """The rows as text."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [row.cells() for row in rows]
    used = [index for index in range(len(COLUMNS)) if any(row[index] for row in cells)]
    for title in (COLUMNS[index] for index in used):
        words = title in _WORDS
        found.add_column(title, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in cells:
        found.add_row(*(Text(row[index]) for index in used))  # names hold brackets, which are no markup
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(found)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def to_json(rows: Sequence[Closest], matrix: Matrix | None = None) -> str:
    """The rows as strict JSON, and the variants of a matrix."""
    tree: dict[str, Any] = {"schema_version": 1, "rows": [row.to_json() for row in rows]}
    if matrix is not None:
        tree["variants"] = [*matrix.tree]
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def to_html(rows: Sequence[Closest], failures: Sequence[Call] = (), matrix: Matrix | None = None) -> str:
    """The rows, a matrix, and the failures in words, as one page that needs no other file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from regress.report.text import headline

    environment = Environment(
        loader=PackageLoader("regress.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    lines = [headline(call.verdict, call.where) for call in failures]
    template = environment.get_template("headroom.html.j2")
    cells = [row.cells() for row in rows]
    return template.render(columns=COLUMNS, words=_WORDS, rows=cells, failures=lines, matrix=matrix)


def write(folder: Path, calls: Iterable[Call], matrix: Matrix | None = None) -> list[Path]:
    """Write ``headroom.json`` and ``index.html`` into a folder, each whole or not at all."""
    known = list(calls)
    rows = closest_calls(known)
    failures = sorted((call for call in known if not call.verdict.ok), key=_place)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {JSON_NAME: to_json(rows, matrix), HTML_NAME: to_html(rows, failures, matrix)}
    for name, text in texts.items():
        write_atomically(folder / name, [text.encode()])
    return [folder / name for name in texts]


def _place(call: Call) -> str:
    return f"{placed(call.where, call.verdict)}: {named(call.verdict)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
