"""Progress of a command: a bar on a terminal; where its messages go to a file, a line every half minute.

Both go to stderr, so that what a command prints can be read by programs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

from regress.printable_text import echo, printable

EVERY = 30.0
"""Seconds between two lines."""


class Bar:
    """Progress of one piece of work; made by `progress`."""

    def __init__(self, bars: Progress, task: Task) -> None:
        self._bars, self._task, self._shown_at = bars, task, monotonic()

    def advance(self, count: int = 1) -> None:
        """Add units that are done."""
        self._bars.advance(self._task.id, count)
        if self._bars.console.is_terminal or monotonic() - self._shown_at < EVERY:
            return
        self._shown_at = monotonic()
        task = self._task
        total = "" if task.total is None else f" of {task.total:.0f}"
        echo(f"{task.completed:.0f}{total} after {task.elapsed or 0:.0f} s: {task.description}", err=True)

    def name(self, work: str) -> None:
        """Name what is being done."""
        self._bars.update(self._task.id, description=printable(work))

    def expect(self, total: int) -> None:
        """Set the number of all units."""
        self._bars.update(self._task.id, total=total)


@contextmanager
def progress(work: str = "", total: int | None = None) -> Iterator[Bar]:
    """Show the progress of work while the context lasts.

    Args:
        work: what is being done.
        total: number of all units; none if it is not known yet.
    """
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    bars = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        disable=not console.is_terminal,
    )
    with bars:
        task = bars.add_task(printable(work), total=total)
        yield Bar(bars, bars.tasks[task])
