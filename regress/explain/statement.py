"""Statements about a trainer, each with its evidence, and the explanation that they form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Statement:
    """One finding.

    Attributes:
        subject: topic, such as "temperature", "mask", "aggregation".
        text: the finding as one sentence.
        values: the readings that fit, in machine form; several where the dump cannot tell them apart.
        evidence: the numbers that prove it.
        departure: True if it contradicts what a trainer of this kind has to do.
    """

    subject: str
    text: str
    values: tuple[Any, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    departure: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the statement as plain JSON."""
        return {
            "subject": self.subject,
            "text": self.text,
            "values": _plain(self.values),
            "evidence": _plain(self.evidence),
            "departure": self.departure,
        }


@dataclass(frozen=True)
class Explanation:
    """Explanation of a trainer from one recorded update.

    Attributes:
        path: the dump.
        step, update: which update was read; `update` is None where a step has one.
        statements: findings in the order of computation.
        undetermined: subject -> why this dump does not tell, and what to record for it.
    """

    path: str
    step: int
    update: int | None
    statements: tuple[Statement, ...]
    undetermined: dict[str, str]

    def about(self, subject: str) -> Statement | None:
        """Return the statement on a subject that is no departure, or None where there is none."""
        found = (s for s in self.statements if s.subject == subject and not s.departure)
        return next(found, None)

    @property
    def departures(self) -> tuple[Statement, ...]:
        """Findings that contradict what such a trainer has to do."""
        return tuple(statement for statement in self.statements if statement.departure)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain JSON."""
        return {
            "schema_version": 1,
            "path": self.path,
            "step": self.step,
            "update": self.update,
            "statements": [statement.to_json() for statement in self.statements],
            "undetermined": dict(self.undetermined),
        }

    def to_text(self) -> str:
        """Return the explanation for a terminal: one line a statement, its evidence below it."""
        place = f"step {self.step}" + ("" if self.update is None else f", update {self.update}")
        lines = [f"{self.path}, {place}:"]
        for statement in self.statements:
            mark = "departure: " if statement.departure else ""
            lines.append(f"  {statement.subject + ':':<14} {mark}{statement.text}")
            shown = ", ".join(f"{name} {_short(value)}" for name, value in statement.evidence.items())
            if shown:
                lines.append(f"  {'':<14}   ({shown})")
        for subject, why in self.undetermined.items():
            lines.append(f"  {subject + ':':<14} not determinable from this dump: {why}")
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON; an infinite bound becomes a word, as JSON has no infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value[:6]) + (", ...]" if len(value) > 6 else "]")
    if isinstance(value, dict):
        return "; ".join(f"{key} {_short(item)}" for key, item in list(value.items())[:6])
    return str(value)
