"""A discrepancy between two modes: its name, its cause, and what proves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TRAINER, CLIENT, SERVICE = "the self-hosted trainer", "the client", "the service"


@dataclass(frozen=True)
class Discrepancy:
    """A discrepancy; see `regress.compare.diagnosis.probable_cause.Diagnosis` for those of single tensors.

    Attributes:
        rule: its name.
        cause: one sentence.
        evidence: findings that prove it.
        explains: quantities that differ because of it.
    """

    rule: str
    cause: str
    evidence: tuple[str, ...]
    explains: tuple[str, ...] = ()
    step: int | None = None

    def __str__(self) -> str:
        """Return text: ``found: CAUSE (RULE; proven by EVIDENCE)``."""
        where = "" if self.step is None else f"step {self.step}: "
        return f"found: {where}{self.cause} (rule {self.rule}; proven by {'; '.join(self.evidence)})"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {**asdict(self), "evidence": [*self.evidence], "explains": [*self.explains]}


def some(names: Sequence[str], word: str, most: int = 3) -> str:
    """Return a number of things with the first of them by name: ``2 datums (a, b)``."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} {word}{'s' * (len(names) != 1)} ({', '.join(names[:most])}{more})"
