"""Report on one screen, and complete as plain text."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from regress.printed import printable
from regress.report.headroom import COLUMNS, WORDS, Closest
from regress.report.model import Report
from regress.report.numbers import plural
from regress.report.ranks import first_failing, rank_tables
from regress.report.text import headline

WIDTH, HEIGHT = 80, 24
"""Columns and lines of a terminal of the default size."""

_NARROW = ("quantity", "precision", "x tolerance", "headroom", "passed", "failed")
"""Columns of the headroom table on a narrow terminal."""
_WIDE = 120
_LOGS = ("GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "TRAVIS", "DRONE", "WOODPECKER")
"""Variables of CI systems whose logs show colours, although they are no terminals."""


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


def whole(report: Report, width: int = _WIDE) -> str:
    """Return everything as plain text: failures, every quantity by rank and microbatch, headroom."""
    parts = [
        f"{printable(block)}\n" if isinstance(block, str) else printed(block, width, False)
        for block in _everything(report, width)
    ]
    return "\n".join(part for part in parts if part.strip())


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
    yield headroom_table(_nearest_first(report), width)


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
        yield table.render(ranks=4, micros=max(1, (width - 16) // 13))
        yield _text(table.statistics)
        yield _text("")


def _everything(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield blocks for a terminal, and texts that are lines already."""
    yield _state(report)
    for name, error in report.errors.items():
        yield _text(f"! {name}: {error}")
    for where in dict.fromkeys([*report.divergences, *report.diagnoses]):
        found = [report.divergences[where]] if where in report.divergences else []
        yield _text("\n".join([where, *map(str, found), *map(str, report.diagnoses.get(where, ()))]))
    yield "\n".join(f"✗ {headline(call.verdict, call.where)}" for call in report.failed)
    for table in rank_tables(report.calls):
        yield f"--- {table.title} ---"
        yield "\n".join(table.lines())
        yield table.statistics
    yield headroom_table(report.closest, max(width, 200))
    yield _text("\n".join([*report.notes, *(f"{key}: {value}" for key, value in report.environment.items())]))


def headroom_table(rows: list[Closest], width: int) -> Table:
    """Return the closest call of every quantity, in as many columns as there is room for."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [row.cells() for row in rows]
    wanted = [i for i, name in enumerate(COLUMNS) if width >= _WIDE or name in _NARROW]
    used = [index for index in wanted if any(row[index] for row in cells)]
    for title in (COLUMNS[index] for index in used):
        words = title in WORDS
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*(_text(line[index]) for index in used), style="red" if row.failed else None)
    return table


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
