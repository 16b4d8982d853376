"""Table of texts, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from regress.printable_text import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns.

    Attributes:
        title: name above it, where there are several; ``hint`` stands below that in a page.
        words: columns that are aligned as words; all of them by default.
        folded: columns whose texts a narrow terminal may break into lines.
        bad: numbers of the rows that tell of failures.
        marked: True if single cells tell of failures: they begin with ✗, end with ``failed`` or are ``not run``.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    hint: str = ""
    words: Collection[str] | None = None
    folded: Collection[str] = ()
    bad: Collection[int] = ()
    marked: bool = False

    def is_words(self, column: str) -> bool:
        """Return True for a column that is aligned as words."""
        return self.words is None or column in self.words

    def is_bad(self, cell: str) -> bool:
        """Return True for a cell that tells of a failure."""
        return self.marked and (cell.startswith("✗") or cell.endswith(" failed") or cell == "not run")

    def only(self, columns: Collection[str]) -> Table:
        """Return the table with some of its columns, as far as anything is in them."""
        kept = [
            n for n, name in enumerate(self.columns) if name in columns and any(row[n] for row in self.rows)
        ]
        rows = [[row[n] for n in kept] for row in self.rows]
        return replace(self, columns=[self.columns[n] for n in kept], rows=rows)

    def lines(self) -> list[str]:
        """Return the whole table as plain text; a terminal's table is made far more slowly."""
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = [str.ljust if self.is_words(name) else str.rjust for name in self.columns]
        texts = [
            "   ".join(
                align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)
            ).rstrip()
            for row in table
        ]
        return [texts[0], "\u2500" * (sum(widths) + 3 * (len(widths) - 1)), *texts[1:]]

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        found = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left")
        found.title = self.title or None
        for name in self.columns:
            folded = name in self.folded
            found.add_column(
                name,
                justify="left" if self.is_words(name) else "right",
                no_wrap=not folded,
                overflow="fold" if folded else "ellipsis",
            )
        for number, row in enumerate(self.rows):
            cells = (Text(printable(cell), self._style(cell)) for cell in row)
            found.add_row(*cells, style="red" if number in self.bad else None)
        return found

    def _style(self, cell: str) -> str:
        if self.is_bad(cell):
            return "bold red"
        return "green" if self.marked and cell.startswith("✓") else ""
