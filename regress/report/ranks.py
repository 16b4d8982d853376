"""Quantity by rank and microbatch: which of them agree, and the size of the differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from regress.compare.quantities import order_of
from regress.compare.verdicts.verdict import Verdict
from regress.report.call import Call
from regress.report.numbers import plural, short

Key = tuple[int | None, int | None]
"""Rank and microbatch; None where one value applies to all of them."""


@dataclass(frozen=True)
class RankTable:
    """Comparisons of one quantity in one replay or pair of dumps.

    Attributes:
        where: place of the calls.
        quantity: its name.
        cells: the verdicts at each rank and microbatch.
    """

    where: str
    quantity: str
    cells: dict[Key, list[Verdict]]

    @property
    def failed(self) -> int:
        """Number of comparisons that are not ok."""
        return sum(not verdict.ok for verdicts in self.cells.values() for verdict in verdicts)

    @property
    def title(self) -> str:
        """Title such as ``log_probs of dense/tp2: 3 of 16 checks failed``."""
        count = sum(map(len, self.cells.values()))
        found = f"{self.failed} of {plural(count, 'check')} failed" if self.failed else plural(count, "check")
        return f"{self.quantity} of {self.where}: {found}"

    @property
    def statistics(self) -> str:
        """Largest, smallest and mean of the cells' largest differences, in words."""
        found = [_difference(verdicts) for verdicts in self.cells.values()]
        finite = [value for value in found if math.isfinite(value)]
        odd = f", {len(found) - len(finite)} without a number" if len(finite) < len(found) else ""
        if not finite:
            return f"diff: none{odd}"
        mean = math.fsum(finite) / len(finite)
        return f"diff: max {short(max(finite))}, min {short(min(finite))}, mean {short(mean)}{odd}"

    def lines(self) -> list[str]:
        """Return the whole table as plain text, as `render` shows it; a terminal's table is made far more slowly."""
        rows, columns = (_chosen([key[axis] for key in self.cells], set(), None)[0] for axis in (0, 1))
        table = [["", *(_name("micro", micro) for micro in columns)]]
        for rank in rows:
            cells = (self.cells.get((rank, micro)) for micro in columns)
            table.append([_name("rank", rank), *("" if cell is None else _told(cell)[0] for cell in cells)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        texts = [
            "   ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in table
        ]
        return [texts[0], "\u2500" * (sum(widths) + 3 * (len(widths) - 1)), *texts[1:]]

    def render(self, ranks: int | None = None, micros: int | None = None) -> Table:
        """Return the table for a terminal, with a limited number of ranks and microbatches, failed ones first."""
        rows, more_rows = _chosen([key[0] for key in self.cells], self._bad(0), ranks)
        columns, more_columns = _chosen([key[1] for key in self.cells], self._bad(1), micros)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("")
        for micro in columns:
            table.add_column(_name("micro", micro), justify="right", no_wrap=True)
        if more_columns:
            table.add_column(f"{more_columns} more")
        for rank in rows:
            table.add_row(_name("rank", rank), *(_cell(self.cells.get((rank, micro))) for micro in columns))
        if more_rows:
            table.add_row(f"{plural(more_rows, 'more rank')}")
        return table

    def _bad(self, axis: int) -> set[int | None]:
        return {key[axis] for key, verdicts in self.cells.items() if not all(v.ok for v in verdicts)}


def rank_tables(calls: Iterable[Call]) -> list[RankTable]:
    """Return one table for each place of comparison and quantity, the latter in the order of computation."""
    found: dict[tuple[str, str], dict[Key, list[Verdict]]] = {}
    for call in calls:
        verdict = call.verdict
        cells = found.setdefault((call.where, verdict.quantity), {})
        cells.setdefault((verdict.place.rank, verdict.place.micro), []).append(verdict)
    tables = [RankTable(where, quantity, cells) for (where, quantity), cells in found.items()]
    wheres = [*dict.fromkeys(table.where for table in tables)]
    return sorted(tables, key=lambda table: (wheres.index(table.where), order_of(table.quantity)))


def first_failing(calls: Sequence[Call]) -> RankTable | None:
    """Return the quantity that failed first, in the update in which it did; None if nothing failed."""
    first = next((call for call in calls if not call.verdict.ok), None)
    if first is None:
        return None
    return rank_tables(call for call in calls if _together(call) == _together(first))[0]


def _together(call: Call) -> tuple[object, ...]:
    return call.where, call.verdict.quantity, call.verdict.place.step, call.verdict.place.update


def _difference(verdicts: Sequence[Verdict]) -> float:
    """Return the largest difference; infinite for a verdict without one, such as a missing tensor."""
    return max(v.max_error if v.ok or v.worst is not None else math.inf for v in verdicts)


def _cell(verdicts: Sequence[Verdict] | None) -> Text:
    if verdicts is None:
        return Text("")
    told, bad = _told(verdicts)
    return Text(told, "bold red" if bad else "green")


def _told(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """Return what a cell says, and whether it is about a failure."""
    bad = [verdict for verdict in verdicts if not verdict.ok]
    difference = _difference(bad or verdicts)
    told = short(difference) if math.isfinite(difference) else str(bad[0].status if bad else "ok")
    return (f"✗ {told}", True) if bad else (f"✓ {told}", False)


def _chosen(
    names: Iterable[int | None], bad: set[int | None], limit: int | None
) -> tuple[list[int | None], int]:
    """Return the names to show, in order, and the number of the others."""
    known = sorted(set(names), key=_number)
    first = sorted(known, key=lambda name: (name not in bad, _number(name)))[:limit]
    return sorted(first, key=_number), len(known) - len(first)


def _number(name: int | None) -> int:
    return -1 if name is None else name


def _name(word: str, number: int | None) -> str:
    return "all" if number is None else f"{word}{number}"
