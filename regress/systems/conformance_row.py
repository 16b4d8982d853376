"""Row of the conformance table: one judged cell of one version of a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from regress.systems.protocol import Cell


class Result(StrEnum):
    """Result of a cell."""

    EXACT = "exact"
    DECLARED = "declared"
    WRONG = "wrong"
    UNDECLARED = "declaration gone"
    ERROR = "error"


RED = (Result.WRONG, Result.UNDECLARED, Result.ERROR)
"""Results of a cell that its system fails."""


@dataclass(frozen=True)
class Error:
    """Largest error of a quantity.

    Attributes:
        relative: relative L2 error of its worst tensor, None where nothing was measured.
        multiple: the largest error over the tolerance: beyond 1 it fails; None where it is infinite.
        checks: number of judged tensors, each of a rank and microbatch where the quantity is.
        failed: how many of them fail.
    """

    relative: float | None
    multiple: float | None
    checks: int
    failed: int


@dataclass(frozen=True)
class ConformanceRow:
    """One judged cell.

    Attributes:
        system, version: name of the adapter, and version of the distribution.
        cell: the cell.
        result: `Result`.
        errors: by quantity, in the order of computation.
        told: what is wrong in one sentence: first divergence, error, or what was declared; empty for an exact cell.
        first: quantity and tensor that diverge first; empty where nothing is wrong.
        cause: probable cause of the first divergence; empty without one.
        claimed: what the system's configuration claims, as keys of the engine's configuration.
        explained: what the recorded step really did, by subject.
        facts: proof that the layout was on.
        shims: titles of the shims that the cell needs; those through which numbers pass begin with an exclamation mark.
        listed: what only one side has, a sentence each.
        notes: traceback and output of the rank that failed.
        versions: of the system and what it ran on.
        finding: name of the known finding that the cell shows; of one that is not red: that it showed before.
        stamp: of the environment, by which a run that is resumed knows that the row still holds.
        disk: bytes of the environment, without the packages that it shares with the calling Python.
    """

    system: str
    version: str
    cell: Cell
    result: Result
    errors: Mapping[str, Error] = field(default_factory=dict)
    told: str = ""
    first: str = ""
    cause: str = ""
    claimed: Mapping[str, Any] = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    shims: Sequence[str] = ()
    listed: Sequence[str] = ()
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    plant: str = ""
    finding: str = ""
    stamp: str = ""
    disk: int = 0

    @property
    def known(self) -> bool:
        """True for a red cell that shows a known finding."""
        return bool(self.finding) and self.result in RED

    @property
    def fixed(self) -> bool:
        """True for a cell that a known finding made red, and that is not red any more."""
        return bool(self.finding) and self.result not in RED

    @property
    def worst(self) -> tuple[str, Error] | None:
        """The quantity with the largest multiple of its tolerance, failed ones first."""
        found = [
            (error.failed > 0, _size(error), name) for name, error in self.errors.items() if error.checks
        ]
        if not found:
            return None
        name = max(found)[2]
        return name, self.errors[name]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the inverse of `from_json`."""
        return {**asdict(self), "result": str(self.result), "shims": [*self.shims]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConformanceRow:
        """Rebuild a row written by `to_json`."""
        errors = {name: Error(**error) for name, error in data["errors"].items()}
        cell = Cell.from_json(data["cell"])
        return cls(**{**data, "cell": cell, "result": Result(data["result"]), "errors": errors})


def _size(error: Error) -> float:
    return float("inf") if error.multiple is None else error.multiple
