"""What a replay came to, small enough to be shared: per place and quantity the failures and the closest call."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.compare.verdict import Place, Verdict


@dataclass
class Outcome:
    """The verdicts on one quantity at one place.

    Attributes:
        failed: every verdict that is not ok, in the order of computation.
        closest: the passing verdict with the least headroom.
        tensors, elements: how much was compared.
    """

    failed: list[Verdict] = field(default_factory=list)
    closest: Verdict | None = None
    tensors: int = 0
    elements: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count a verdict in."""
        self.tensors += 1
        self.elements += verdict.count
        if not verdict.ok:
            self.failed.append(verdict)
        elif self.closest is None or verdict.multiple > self.closest.multiple:
            self.closest = verdict


@dataclass
class ReplayOutcome:
    """All outcomes of a replay by ``(place, quantity)``, or the sentence that says why it could not run."""

    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def of(cls, verdicts: Iterable[Verdict], tested: Collection[tuple[str, str]]) -> ReplayOutcome:
        """Group verdicts by place and quantity.

        Args:
            tested: the places and quantities that have a test. What fails elsewhere, such as a quantity that was not
                recorded, counts for the coverage of its update, or no test would show it.
        """
        result = cls()
        for verdict in verdicts:
            key = (str(verdict.place), verdict.quantity)
            if key not in tested and not verdict.ok:
                key = (str(Place(verdict.place.step, verdict.place.update)), "coverage")
            result.outcomes.setdefault(key, Outcome()).add(verdict)
        return result

    @property
    def failed(self) -> list[Verdict]:
        """Every verdict that is not ok, in the order of computation."""
        return [verdict for outcome in self.outcomes.values() for verdict in outcome.failed]

    def dumps(self) -> str:
        """As JSON text, the inverse of `loads`."""
        rows = [
            {
                "place": place,
                "quantity": quantity,
                "failed": [verdict.to_json() for verdict in outcome.failed],
                "closest": outcome.closest.to_json() if outcome.closest is not None else None,
                "tensors": outcome.tensors,
                "elements": outcome.elements,
            }
            for (place, quantity), outcome in self.outcomes.items()
        ]
        return json.dumps({"error": self.error, "outcomes": rows})

    @classmethod
    def loads(cls, text: str) -> ReplayOutcome:
        """Rebuild what `dumps` wrote."""
        tree = json.loads(text)
        return cls(
            {(row["place"], row["quantity"]): _outcome(row) for row in tree["outcomes"]}, tree["error"]
        )


def _outcome(row: Mapping[str, Any]) -> Outcome:
    closest = row["closest"]
    return Outcome(
        [Verdict.from_json(verdict) for verdict in row["failed"]],
        None if closest is None else Verdict.from_json(closest),
        row["tensors"],
        row["elements"],
    )
