"""Report on one screen, and complete as plain text."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, RenderableType
from rich.text import Text

from regress.compare.quantities import order_of
from regress.compare.verdicts.verdict import Verdict
from regress.printable_text import printable
from regress.report.headroom import COLUMNS, Closest, closest_table
from regress.report.number_format import plural, short
from regress.report.report_model import Report
from regress.report.text_table import Table
from regress.report.verdict_entries import Call
from regress.report.verdict_text import headline

WIDTH, HEIGHT = 80, 24
"""Columns and lines of a terminal of the default size."""

_NARROW = ("quantity", "precision", "x tolerance", "headroom", "passed", "failed")
"""Columns of the headroom table on a narrow terminal."""
_LOGS = ("GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "TRAVIS", "DRONE", "WOODPECKER")
"""Variables of CI systems whose logs show colours, although they are not terminals."""


def colourful(terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True to write colours: ``NO_COLOR`` forbids, ``FORCE_COLOR`` asks, else terminals and logs of
    CI have them.
    """
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or terminal or any(environment.get(name) for name in _LOGS)


def screen(
    report: Report, *, width: int = WIDTH, height: int = HEIGHT, colour: bool = False, causes: bool = True
) -> str:
    """Return the report in at most ``height`` lines of ``width`` columns: failures first, then the closest calls.

    Lines that do not fit are counted; the files of the report hold all of them.

    Args:
        causes: name the probable cause beside each first divergence.
    """
    lines: list[str] = []
    for block in _blocks(report, width, causes):
        text = printed(block, width, colour).splitlines()
        room = height - len(lines)
        if len(text) > room:
            lines += [*text[: room - 1], _more(len(text) - room + 1)] if room > 3 else []
            break
        lines += text
    return "".join(f"{line}\n" for line in lines)


def whole(report: Report) -> str:
    """Return everything as plain text: failures, every quantity by rank and microbatch, headroom."""
    return "\n".join(f"{printable(block)}\n" for block in _everything(report) if block.strip())


def printed(block: RenderableType, width: int, colour: bool) -> str:
    """Return a block as text, with control sequences of colours or without."""
    system: Literal["standard"] | None = (
        "standard" if colour else None
    )  # the sixteen colours that every log and every theme of a terminal has
    console = Console(
        width=width, file=io.StringIO(), color_system=system, force_terminal=colour, no_color=not colour
    )
    with console.capture() as capture:
        console.print(block, soft_wrap=isinstance(block, Text) and not colour)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _blocks(report: Report, width: int, causes: bool) -> Iterator[RenderableType]:
    yield _wrapped(_state(report), width)
    for name, error in [*report.errors.items()][:3]:
        yield _wrapped(_text(f"! {name}: {error}", "yellow"), width)
    if len(report.errors) > 3:
        yield _text(f"and {len(report.errors) - 3} more could not be judged")
    yield from _failures(report, width, causes)
    yield headroom_table(_nearest_first(report), width).rich()


def _state(report: Report) -> Text:
    style = {"✓": "bold green", "✗": "bold red", "!": "bold yellow"}[report.sign]
    return _text(f"{report.sign} {report.title}: {report.summary}", style)


def _failures(report: Report, width: int, causes: bool) -> Iterator[RenderableType]:
    """Yield the first divergence of some replays, and for the first the quantity by rank and microbatch."""
    wheres = [*dict.fromkeys(call.where for call in report.failed)]
    for where in wheres[:3]:
        first = next(call.verdict for call in report.failed if call.where == where)
        found = report.divergences.get(where)
        line = headline(first, where) if found is None else f"{where}: first {str(found).splitlines()[0]}"
        yield _wrapped(_text(f"✗ {line}", "red"), width)
        for cause in report.diagnoses.get(where, ())[:1] if causes else ():
            yield _wrapped(_text(f"  {str(cause).splitlines()[0]}"), width)
    if len(wheres) > 3:
        yield _text(f"and {plural(len(wheres) - 3, 'more replay')}")
    table = first_failing(report.calls)
    if table is not None:
        yield _text("")
        yield _cut(_text(table.title, "bold"), width)
        yield table.table(ranks=4, micros=max(1, (width - 16) // 13)).rich()
        yield _text(table.statistics)
        yield _text("")


def _everything(report: Report) -> Iterator[str]:
    yield f"{report.sign} {report.title}: {report.summary}"
    yield from (f"! {name}: {error}" for name, error in report.errors.items())
    yield from ("\n".join([where, *first, *causes]) for where, first, causes in report.findings)
    yield "\n".join(f"✗ {headline(call.verdict, call.where)}" for call in report.failed)
    for table in rank_tables(report.calls):
        yield f"--- {table.title} ---"
        yield "\n".join(table.table().lines())
        yield table.statistics
    yield "\n".join(closest_table(report.closest).only(COLUMNS).lines())
    yield "\n".join([*report.notes, *(f"{key}: {value}" for key, value in report.environment.items())])


def headroom_table(rows: Sequence[Closest], width: int) -> Table:
    """Return the closest call of every quantity, in as many columns as there is room for."""
    known = closest_table(rows)
    tables = [known.only(columns) for columns in (COLUMNS, COLUMNS[:-1], _NARROW)]
    return next((table for table in tables if len(max(table.lines(), key=len)) <= width), tables[-1])


def _nearest_first(report: Report) -> list[Closest]:
    """Return failed rows in the order of computation, then the others by least headroom."""
    return sorted(report.closest, key=lambda row: (not row.failed, 0.0 if row.failed else row.headroom))


def _text(text: str, style: str = "") -> Text:
    """Return a text in which nothing acts on a terminal."""
    return Text(printable(text), style)


def _wrapped(text: Text, width: int) -> Text:
    """Wrap over as many lines as needed: a sentence begins with the error and ends with the remedy."""
    return Text("\n").join(text.wrap(Console(width=width), width, overflow="fold"))


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _more(count: int) -> str:
    return f"and {plural(count, 'more line')}"


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

    def table(self, ranks: int | None = None, micros: int | None = None) -> Table:
        """Return the table with a limited number of ranks and microbatches, failed ones first."""
        rows, more_rows = _chosen([key[0] for key in self.cells], self._bad(0), ranks)
        columns, more_columns = _chosen([key[1] for key in self.cells], self._bad(1), micros)
        cells = [
            [_name("rank", rank), *(_cell_text(self.cells.get((rank, n))) for n in columns)] for rank in rows
        ]
        cells += [[plural(more_rows, "more rank")]] if more_rows else []
        titles = ["", *(_name("micro", micro) for micro in columns)]
        titles += [f"{more_columns} more"] if more_columns else []
        return Table(titles, cells, words=("",), marked=True)

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


def _cell_text(verdicts: Sequence[Verdict] | None) -> str:
    """Return what a cell says."""
    if verdicts is None:
        return ""
    bad = [verdict for verdict in verdicts if not verdict.ok]
    difference = _difference(bad or verdicts)
    value = short(difference) if math.isfinite(difference) else str(bad[0].status if bad else "ok")
    return f"✗ {value}" if bad else f"✓ {value}"


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
