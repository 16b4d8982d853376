"""Outcome of a replay, small enough to be shared: per place and quantity the failures and the closest call."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from regress.compare.diagnosis.first_divergence import Divergence, find_divergence
from regress.compare.diagnosis.layer_names import merged_layers, multiples_by_layer
from regress.compare.diagnosis.probable_cause import Diagnosis, diagnose
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.quantities import NEW
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.errors import ReplayError, reason
from regress.json_schema import conform
from regress.report.verdict_entries import Call
from regress.untrusted_files import DOCUMENT, parse_json, read_bytes

FILE = "outcome.json"
"""File that holds the outcome of a replay in its folder."""


class _Row(TypedDict):
    place: str
    quantity: str
    failed: list[dict[str, Any]]
    closest: dict[str, Any] | None
    tensors: int
    elements: int
    layers: dict[str, float]


class _Document(TypedDict):
    error: str | None
    unsupported: NotRequired[str | None]
    outcomes: list[_Row]
    divergence: dict[str, Any] | None
    diagnoses: list[dict[str, Any]]
    notes: NotRequired[list[str]]


@dataclass
class Outcome:
    """Verdicts on one quantity at one place.

    Attributes:
        failed: every verdict that is not ok, in the order of computation.
        closest: the passing verdict with the least headroom.
        tensors, elements: number of compared tensors and elements.
        layers: layer of the model -> largest error in multiples of its tolerance, over all verdicts.
    """

    failed: list[Verdict] = field(default_factory=list)
    closest: Verdict | None = None
    tensors: int = 0
    elements: int = 0
    layers: dict[str, float] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        """Add a verdict."""
        self.tensors += 1
        self.elements += verdict.count
        self.layers = merged_layers([self.layers, multiples_by_layer([verdict])])
        if not verdict.ok:
            self.failed.append(verdict)
        elif self.closest is None or verdict.multiple > self.closest.multiple:
            self.closest = verdict

    def calls(self, where: str, precision: str, test: str = "") -> list[Call]:
        """Return the calls for a report: all failures, and the closest passing verdict.

        Args:
            where: the replay.
            test: id of the test that asks.
        """
        verdicts = [*self.failed, *([] if self.closest is None else [self.closest])]
        return [
            Call(where, precision, verdict, {} if number else self.layers, test)
            for number, verdict in enumerate(verdicts)
        ]


@dataclass
class ReplayOutcome:
    """All outcomes of a replay by ``(place, quantity)``, or the sentence that explains why it could not run.

    Attributes:
        unsupported: reason a user's own trainer does not support the variant; it was not run then.
        divergence: first divergence, if any; ``diagnoses`` are the probable causes.
        notes: what passed and was not judged, a sentence each.
    """

    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    error: str | None = None
    unsupported: str | None = None
    divergence: Divergence | None = None
    diagnoses: list[Diagnosis] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        verdicts: Sequence[Verdict],
        tested: Collection[tuple[str, str]],
        scene: RunContext | None = None,
        place: Callable[[Place], Place] = lambda place: place,
    ) -> ReplayOutcome:
        """Group verdicts by place and quantity.

        Args:
            tested: the places and quantities that have a test. What fails elsewhere, such as a quantity that was not
                recorded, counts for the coverage of its update, or no test would show it.
            scene: run context, for the diagnosis.
            place: place of the test for a verdict's place.
        """
        divergence = find_divergence(verdicts, scene)
        diagnoses = [] if divergence is None else diagnose(divergence, scene)
        new = (f"{verdict.quantity}/{verdict.name}: {NEW}" for verdict in verdicts if verdict.detail == NEW)
        result = cls(divergence=divergence, diagnoses=diagnoses, notes=[*dict.fromkeys(new)])
        for verdict in verdicts:
            key = (str(place(verdict.place)), verdict.quantity)
            if key not in tested and not verdict.ok:
                key = (str(verdict.place.of_update), "coverage")
            result.outcomes.setdefault(key, Outcome()).add(verdict)
        return result

    @property
    def quantities(self) -> set[str]:
        """Quantities of which anything was compared or missed."""
        return {quantity for _, quantity in self.outcomes}

    @property
    def failed(self) -> list[Verdict]:
        """Every verdict that is not ok, in the order of computation."""
        return [verdict for outcome in self.outcomes.values() for verdict in outcome.failed]

    def dumps(self) -> str:
        """Return JSON text that `loads` reads."""
        rows = [
            {
                "place": place,
                "quantity": quantity,
                "failed": [verdict.to_json() for verdict in outcome.failed],
                "closest": outcome.closest.to_json() if outcome.closest is not None else None,
                "tensors": outcome.tensors,
                "elements": outcome.elements,
                "layers": outcome.layers,
            }
            for (place, quantity), outcome in self.outcomes.items()
        ]
        divergence = None if self.divergence is None else self.divergence.to_json()
        diagnoses = [diagnosis.to_json() for diagnosis in self.diagnoses]
        tree = {"error": self.error, "unsupported": self.unsupported, "outcomes": rows}
        return json.dumps({**tree, "divergence": divergence, "diagnoses": diagnoses, "notes": self.notes})

    @classmethod
    def loads(cls, text: str) -> ReplayOutcome:
        """Rebuild an outcome written by `dumps`.

        Raises:
            ReplayError: for any other text.
        """
        try:
            return cls._of(conform(parse_json(text, finite=False), _Document, "it"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ReplayError(f"an outcome of a replay is damaged ({reason(error)}): replay again") from None

    @classmethod
    def _of(cls, tree: _Document) -> ReplayOutcome:
        divergence = tree["divergence"]
        return cls(
            {(row["place"], row["quantity"]): _outcome(row) for row in tree["outcomes"]},
            tree["error"],
            tree.get("unsupported"),
            None if divergence is None else Divergence.from_json(divergence),
            [Diagnosis.from_json(diagnosis) for diagnosis in tree["diagnoses"]],
            tree.get("notes", []),
        )


def read_outcomes(root: Path, wheres: Iterable[str]) -> dict[str, ReplayOutcome]:
    """Return the outcomes of those replays that were judged below a folder."""
    paths = {where: root / where / FILE for where in wheres}
    return {where: ReplayOutcome.loads(_read(path)) for where, path in paths.items() if path.is_file()}


def _read(path: Path) -> str:
    try:
        return read_bytes(path, DOCUMENT).decode("utf-8", "replace")
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error.strerror}): replay again") from error


def _outcome(row: _Row) -> Outcome:
    closest = row["closest"]
    return Outcome(
        [Verdict.from_json(verdict) for verdict in row["failed"]],
        None if closest is None else Verdict.from_json(closest),
        row["tensors"],
        row["elements"],
        row["layers"],
    )
