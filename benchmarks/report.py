"""Report of a benchmark: a table for people, a line of JSON for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Measured


@dataclass
class Report:
    """Rows of one benchmark.

    Attributes:
        name: as on the command line.
        title: what the rows are about.
        facts: what the figures depend on, and what was checked.
        rows: side -> column -> text or number.
        goals: figure -> (value, what it should be at most).
    """

    name: str
    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add_times(self, measured: Measured, base: str, prefix: str = "") -> None:
        """Add one row per side: median step time, and the ratio to the side ``base`` with its extremes."""
        for name in measured.rounds[0]:
            ratios = measured.ratios(name, base)
            self.rows[prefix + name] = {
                "wall s": round(measured.wall(name), 4),
                "ratio": round(measured.ratio(name, base), 3),
                "min": round(min(ratios), 3),
                "max": round(max(ratios), 3),
                "CPU ratio": round(measured.cpu_ratio(name, base), 3),
            }

    def show(self, console: Console) -> None:
        """Print table, goals and facts, then everything as one line of JSON on standard output."""
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        table = Table(title=f"{self.name}: {self.title}", title_justify="left")
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in self.rows.items():
            table.add_row(name, *(str(row.get(column, "")) for column in columns))
        console.print(table)
        for name, (value, goal) in self.goals.items():
            verdict = "met" if value <= goal else "missed"
            console.print(f"{name}: {value:.3f}, goal at most {goal}: {verdict}", highlight=False)
        goals = {name: {"value": value, "at_most": goal} for name, (value, goal) in self.goals.items()}
        line = {"benchmark": self.name, "goals": goals, "rows": self.rows, **self.facts}
        print(json.dumps(line), flush=True)
