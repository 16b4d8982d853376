"""Results of a validation: headroom of healthy replays, and multiples of faults, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from regress.compare.quantities import order_of
from regress.report.numbers import short


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
    quantities = sorted({row.quantity for row in rows}, key=order_of)
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    found.add_column("quantity", no_wrap=True)
    for precision in precisions:
        found.add_column(precision, justify="right", no_wrap=True)
        found.add_column("in", no_wrap=True)
    for quantity in [*quantities, None]:
        cells = ["any" if quantity is None else quantity]
        for precision in precisions:
            own = [row for row in rows if row.precision == precision and quantity in (None, row.quantity)]
            widest = max(own, key=lambda row: row.multiple)
            cells += [short(widest.multiple), f"{widest.name}, seed {widest.seed}" if widest.multiple else ""]
        found.add_row(*(Text(cell) for cell in cells))
    return found


def faults_table(rows: Iterable[Faulty]) -> Table:
    """Return a row for each fault: the seeds under which it changes anything, those in which it fails, and its size."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    found.add_column("fault", no_wrap=True)
    for title in ("seeds", "exercised", "caught", "smallest multiple", "largest"):
        found.add_column(title, justify="right", no_wrap=True)
    found.add_column("where, in the smallest", overflow="fold")
    by_name: dict[str, list[Faulty]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for name, own in by_name.items():
        hit = sorted((row for row in own if row.exercised), key=lambda row: row.multiple)
        caught = str(sum(row.caught for row in hit))
        ends = (short(hit[0].multiple), short(hit[-1].multiple), hit[0].worst) if hit else ("-", "-", "")
        found.add_row(*(Text(cell) for cell in (name, str(len(own)), str(len(hit)), caught, *ends)))
    return found
