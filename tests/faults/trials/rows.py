"""Rows of a run of the corpus of faults, and what they add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict, cast

from regress.errors import ReplayError, reason
from regress.json_schema import conform
from regress.untrusted_files import DOCUMENT, parse_json, read_bytes

SCHEMA = 1
DIAGNOSES = ("right", "wrong", "silent")
"""Readings of a first diagnosis."""
WRONG = ("semantic", "precision")
"""Kinds that must be flagged; the others must not."""
MARGINS: Mapping[str, float] = {"semantic": 1e3, "precision": 3.0}
"""Least multiple of the tolerance by which a fault of a kind has to be caught somewhere."""


@dataclass(frozen=True)
class FaultRow:
    """One fault in one replay.

    Attributes:
        expected: quantity, and perhaps tensor, that had to fail first; written before the first run.
        first: quantity and tensor that did.
        multiple: largest error of that quantity over its tolerance; None for an exact verdict.
        stage, tensor: True if quantity and tensors are those that were expected.
        rules: diagnoses, the first of which is scored: ``diagnosis`` is ``right``, ``wrong``, ``silent``, or "".
        common: check of common practice -> True if it would have noticed; ``values`` are what the checks look at.
        problem: what ended the replay, if anything did.
    """

    fault: str
    category: str
    kind: str
    source: str
    case: str
    variant: str
    precision: str
    held_out: bool
    fresh: bool
    expected: str
    caught: bool
    first: str = ""
    place: str = ""
    multiple: float | None = None
    stage: bool = False
    tensor: bool = False
    rules: tuple[str, ...] = ()
    diagnosis: str = ""
    common: Mapping[str, bool] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Fault, case, variant and precision."""
        suffix = {"float64": "", "float32": "-fp32", "bfloat16": "-bf16"}.get(
            self.precision, f"-{self.precision}"
        )
        return f"{self.fault}-{self.case}-{self.variant}{suffix}"

    @property
    def wrong(self) -> bool:
        """True if the fault must be flagged."""
        return self.kind in WRONG

    @property
    def margin(self) -> float:
        """Multiple of the tolerance by which it was caught: infinite for an exact verdict, 0 if it was not."""
        if not self.caught:
            return 0.0
        return math.inf if self.multiple is None else self.multiple

    @property
    def as_it_should(self) -> bool:
        """True if it was flagged, or left alone, as its kind asks for."""
        return self.caught == self.wrong and not (self.problem and not self.wrong)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, the inverse of `from_json`; values that are not finite are left out."""
        known = {name: value for name, value in self.values.items() if math.isfinite(value)}
        return asdict(self) | {"rules": [*self.rules], "values": known, "common": dict(self.common)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FaultRow:
        """Rebuild what `to_json` wrote."""
        known = {spec.name: data[spec.name] for spec in fields(cls) if spec.name in data}
        return cls(**{**known, "rules": tuple(known.get("rules", ()))})


@dataclass(frozen=True)
class FaultScore:
    """Totals of rows.

    Attributes:
        faults: faults that must be flagged, by name, each with its rows.
        escaped: those that no replay of theirs flags, or none by the margin of their kind.
        alarms: rows of what must not be flagged, and was, or could not be replayed.
    """

    faults: Mapping[str, Sequence[FaultRow]]
    escaped: Sequence[str]
    alarms: Sequence[FaultRow]
    quiet: Sequence[FaultRow]

    @property
    def caught(self) -> int:
        """Number of faults that are caught by the margin of their kind."""
        return len(self.faults) - len(self.escaped)

    def share(self, what: str) -> tuple[int, int]:
        """Return in how many of the caught rows ``stage`` or ``tensor`` is right, and how many there are."""
        known = [row for rows in self.faults.values() for row in rows if row.caught]
        return sum(bool(getattr(row, what)) for row in known), len(known)

    def diagnoses(self, *, held_out: bool | None = None) -> dict[str, int]:
        """Return the number of first diagnoses, one a fault, of one part of the faults or all."""
        found = dict.fromkeys(DIAGNOSES, 0)
        for rows in self.faults.values():
            told = next((row for row in rows if row.diagnosis), None)
            if told is not None and held_out in (None, told.held_out):
                found[told.diagnosis] += 1
        return found

    def noticed(self, check: str) -> tuple[int, int]:
        """Return how many faults a check of common practice notices in any of their replays, and of how many."""
        known = [rows for rows in self.faults.values() if any(check in row.common for row in rows)]
        return sum(any(row.common.get(check, False) for row in rows) for rows in known), len(known)

    def disturbed(self, check: str) -> tuple[int, int]:
        """Return how many replays that must not be flagged a check of common practice flags, and of how many."""
        known = [row for row in self.quiet if check in row.common]
        return sum(row.common[check] for row in known), len(known)

    @property
    def exit_code(self) -> int:
        """0 if everything is flagged that has to be, and nothing else; 1 otherwise."""
        return int(bool(self.escaped or self.alarms))


def score(rows: Iterable[FaultRow]) -> FaultScore:
    """Return what rows add up to."""
    known = [*rows]
    quiet = [row for row in known if not row.wrong]
    faults: dict[str, list[FaultRow]] = {}
    for row in known:
        if row.wrong:
            faults.setdefault(row.fault, []).append(row)
    escaped = [name for name, own in faults.items() if max(row.margin for row in own) < MARGINS[own[0].kind]]
    return FaultScore(faults, escaped, [row for row in quiet if not row.as_it_should], quiet)


def to_json(rows: Sequence[FaultRow]) -> str:
    """Return rows as text that `from_json` reads."""
    tree = {"schema": SCHEMA, "rows": [row.to_json() for row in rows]}
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"


class _Document(TypedDict):
    rows: list[FaultRow]


def from_json(text: str | bytes) -> list[FaultRow]:
    """Return the rows that `to_json` has written; raises `ValueError` with a clause for anything else."""
    tree: _Document = conform(parse_json(text), _Document, "it")
    rows = [FaultRow.from_json(cast("Mapping[str, Any]", row)) for row in tree["rows"]]
    for row in rows:
        if row.diagnosis not in ("", *DIAGNOSES):
            raise ValueError(f"the diagnosis of {row.name} is {row.diagnosis!r}")
    return rows


def read_fault_rows(path: Path) -> list[FaultRow]:
    """Return the rows of a file.

    Raises:
        ReplayError: for a file that holds none.
    """
    try:
        return from_json(read_bytes(path, DOCUMENT))
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"{path} holds no rows of injected faults ({reason(error)}); write one with "
            "python -m tests.faults run --report"
        ) from error
