"""Statements about a trainer, each with its evidence, and the explanation that they form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.credential_redaction import redacted

SCHEMA_VERSION = 2
ON_POLICY = "on policy"
"""Value of a statement on the ratio where every ratio is 1."""
SHOWN = 4
"""Most updates that a line names."""


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

    def lines(self) -> Iterator[str]:
        """Yield the line of a terminal, and its evidence below it."""
        yield f"  {self.subject + ':':<14} {'departure: ' if self.departure else ''}{self.text}"
        shown = ", ".join(f"{name} {_short(value)}" for name, value in self.evidence.items())
        if shown:
            yield f"  {'':<14}   ({shown})"


@dataclass(frozen=True)
class UpdateExplanation:
    """Hold what one update of a trainer shows.

    Attributes:
        step, update: its place; `update` is None where a step has one.
        statements: findings in the order of computation.
        undetermined: subject -> why this update does not tell, and what to record for it.
    """

    step: int
    update: int | None
    statements: tuple[Statement, ...]
    undetermined: dict[str, str]

    @property
    def place(self) -> str:
        """Step and number of the update, in words."""
        return f"step {self.step}" + ("" if self.update is None else f", update {self.update}")

    @property
    def shown(self) -> list[str]:
        """Subjects that something is said on, in order; a ratio of 1 at every token shows nothing of the ratio."""
        subjects = (s.subject for s in self.statements if s.departure or s.values != (ON_POLICY,))
        return list(dict.fromkeys(subjects))

    def lines(self, before: UpdateExplanation | None = None) -> Iterator[str]:
        """Yield the lines of a terminal; what was said of the update before is not said again."""
        known = {} if before is None else before._said()
        same = [subject for subject, texts in self._said().items() if known.get(subject) == texts]
        if same:
            yield f"  {'as before:':<14} {', '.join(same)}"
        for statement in self.statements:
            if statement.subject not in same:
                yield from statement.lines()
        for subject, why in self.undetermined.items():
            if subject not in same:
                yield f"  {subject + ':':<14} not determinable from this dump: {why}"

    def _said(self) -> dict[str, list[str]]:
        """Return the sentences on each subject."""
        found: dict[str, list[str]] = {}
        for statement in self.statements:
            found.setdefault(statement.subject, []).append(statement.text)
        for subject, why in self.undetermined.items():
            found.setdefault(subject, []).append(why)
        return found


@dataclass(frozen=True)
class Explanation:
    """Explanation of a trainer from its recorded updates.

    Attributes:
        path: the dump.
        updates: what each update shows, in order; none where there is an error.
        preset: the preset that the trainer was asked to follow, None without.
        error: why nothing is explained, or why that preset could not be evaluated on any update, as
            `RegressError.to_json` tells it.
    """

    path: str
    updates: tuple[UpdateExplanation, ...]
    preset: str | None = None
    error: Mapping[str, str] | None = None

    @property
    def step(self) -> int | None:
        """Step of the first update that was read."""
        return self.updates[0].step if self.updates else None

    @property
    def update(self) -> int | None:
        """Number of the first update that was read; None where a step has one."""
        return self.updates[0].update if self.updates else None

    @property
    def statements(self) -> tuple[Statement, ...]:
        """Findings on all updates, in order."""
        return tuple(statement for one in self.updates for statement in one.statements)

    @property
    def undetermined(self) -> dict[str, str]:
        """Subject that no update tells -> why the first does not, and what to record for it."""
        said = {subject for one in self.updates for subject in one.shown}
        found: dict[str, str] = {}
        for one in self.updates:
            found = {subject: why for subject, why in one.undetermined.items() if subject not in said} | found
        return found

    def about(self, subject: str) -> Statement | None:
        """Return the first statement on a subject that is not a departure, or None where there is none."""
        found = (s for s in self.statements if s.subject == subject and not s.departure)
        return next(found, None)

    @property
    def departures(self) -> tuple[Statement, ...]:
        """Findings that contradict what such a trainer has to do."""
        return tuple(statement for statement in self.statements if statement.departure)

    @property
    def exit_code(self) -> int:
        """0 explained, 1 a departure or no sign of the preset asked for, 2 a preset that cannot be evaluated."""
        asked = self.preset is not None and not any("preset" in one.shown for one in self.updates)
        return 1 if self.departures else 2 if self.error else int(asked)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain JSON, as docs/reference/report.md says."""
        return {
            "schema_version": SCHEMA_VERSION,
            "path": redacted(self.path),
            "exit_code": self.exit_code,
            "error": self.error,
            "preset": self.preset,
            "step": self.step,
            "update": self.update,
            "statements": [
                {"step": one.step, "update": one.update, **statement.to_json()}
                for one in self.updates
                for statement in one.statements
            ],
            "undetermined": self.undetermined,
            "updates": [
                {"step": one.step, "update": one.update, "shown": one.shown, "undetermined": one.undetermined}
                for one in self.updates
            ],
        }

    def dumps(self) -> str:
        """Return the text of `to_json`."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """Return the explanation for a terminal: one line a statement, its evidence below it."""
        lines = []
        before: UpdateExplanation | None = None
        for one in self.updates:
            lines += [f"{self.path}, {one.place}:", *one.lines(before)]
            before = one
        if len(self.updates) > 1:
            lines += self._shown()
        return "\n".join(lines)

    def _shown(self) -> Iterator[str]:
        """Yield which updates show each subject."""
        yield f"{self.path}, all {len(self.updates)} updates show:"
        subjects = dict.fromkeys(
            subject for one in self.updates for subject in (*one.shown, *one.undetermined)
        )
        places: dict[str, list[str]] = {}
        for subject in subjects:
            shown = [one.place for one in self.updates if subject in one.shown]
            few = "; ".join(shown[:SHOWN]) + (
                f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
            )
            which = "all of them" if len(shown) == len(self.updates) else few or "none of them"
            places.setdefault(which, []).append(subject)
        for which, found in places.items():
            yield f"  {which}: {', '.join(found)}"


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
