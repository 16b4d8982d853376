"""Show the findings of a check as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
RIGHT, DEPARTS, DEPENDS, UNSEEN = "right", "departs", "depends", "not tried"
"""Verdicts: `DEPENDS` is right if the caller does what the line says, `UNSEEN` does not apply to the function."""


@dataclass(frozen=True)
class Checked:
    """One line.

    Attributes:
        name: batch or layout.
        verdict: `RIGHT`, `DEPARTS`, `DEPENDS` or `UNSEEN`.
        text: evidence, or what to do.
    """

    name: str
    verdict: str
    text: str


@dataclass(frozen=True)
class ObjectiveCheck:
    """A loss function beside an objective.

    Attributes:
        function: its name.
        settings: fields that differ from the preset's.
        called_with: what each argument was, one line each.
        rows: batches and layouts.
        departures: what the function does in place of the objective; none where it is the objective.
        notes: worth knowing, and no departure.
        error: why it could not be checked.
    """

    function: str
    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    called_with: tuple[str, ...] = ()
    rows: tuple[Checked, ...] = ()
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: Mapping[str, str] | None = None

    @property
    def exit_code(self) -> int:
        """0 the objective, 1 it departs, 2 it could not be checked."""
        if self.error is not None:
            return 2
        return int(bool(self.departures) or any(row.verdict == DEPARTS for row in self.rows))

    def to_text(self) -> str:
        """Return the check as a terminal shows it."""
        changed = "".join(f" with {name}={value}" for name, value in self.settings.items())
        verdict = "departs from" if self.exit_code else "is"
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{self.function} {verdict} {self.preset}{changed}"]
        lines += [f"  departure: {text}" for text in self.departures]
        lines += [f"  {row.name:<{width}}  {row.verdict:<9}  {row.text}".rstrip() for row in self.rows]
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join([*lines, "  called with:", *(f"    {line}" for line in self.called_with)])

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain JSON, as docs/reference/report.md says."""
        return {
            "schema_version": SCHEMA_VERSION,
            "function": self.function,
            "preset": self.preset,
            "settings": dict(self.settings),
            "exit_code": self.exit_code,
            "error": self.error,
            "departures": [*self.departures],
            "rows": [{"name": row.name, "verdict": row.verdict, "text": row.text} for row in self.rows],
            "notes": [*self.notes],
            "called_with": [*self.called_with],
        }

    def dumps(self) -> str:
        """Return the text of `to_json`."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
