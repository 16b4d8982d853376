"""Judgement of ``metrics.jsonl``, where a replay ran the whole program: each row holds what was reported then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.compare.quantities import METRICS
from regress.compare.updates.invariant_counts import Broken, Checked
from regress.compare.verdicts.verdict import Verdict
from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import METRICS as FILE
from regress.dump.metrics_file import STEP, UPDATE, metrics_of, read_metrics
from regress.dump.record import Record
from regress.replay.replay_plan import PlannedUpdate

NAME = "metrics_file"
SENTENCE = "metrics.jsonl holds what each update and each rollout step reported"
UPDATES, STEPS = METRICS
OF_UPDATES = "training_step/"
COMPONENTS = "training_step/dr_component_"
"""Metrics that only some objectives write, however they are recorded."""

Records = Callable[[PlannedUpdate], Sequence[Record]]


def judge_metrics_file(dump: DumpReader, plan: Sequence[PlannedUpdate], records: Records) -> list[Verdict]:
    """Return a verdict for each update of a replay by the whole program; none for one that made the bare steps.

    Args:
        plan: updates of the replay.
        records: the records of an update.
    """
    path = Path(str(dump.manifest.provenance.config["output_dir"])) / FILE
    return [*_File(read_metrics(path), plan, records).verdicts()] if path.exists() else []


@dataclass
class _File:
    """Rows of the file beside the records of the dump.

    Attributes:
        samples, batches, best: totals of the run up to the step at hand.
    """

    rows: Sequence[Mapping[str, Any]]
    plan: Sequence[PlannedUpdate]
    records: Records
    samples: float = 0.0
    batches: float = 0.0
    best: float = -math.inf
    found: dict[tuple[int, int | None], Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            self.found[row[STEP], row.get(UPDATE)] = metrics_of(row)

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdicts, in the order of the updates."""
        for number, update in enumerate(self.plan):
            known, reported = Checked(), self._reported(update)
            row = self.found.get((update.step, number), {})
            own = reported.get(UPDATES, {})
            expected = {n: v for n, v in own.items() if not n.startswith(COMPONENTS) or n in row}
            self._check(known, row, expected, f"of update {number}")
            if number + 1 == len(self.plan) or self.plan[number + 1].step != update.step:
                self._step(known, update.step, reported.get(STEPS, {}))
            if number + 1 == len(self.plan):
                self._final(known, update.step + 1, number + 1)
            if known.count:
                yield known.verdict(NAME, update.place, SENTENCE)

    def _reported(self, update: PlannedUpdate) -> dict[str, dict[str, float]]:
        """Return the metrics that the first rank recorded of an update, by record type."""
        return {
            record.type: {name: float(value) for name, value in record.tensors.items()}
            for record in self.records(update)
            if record.type in METRICS and not record.rank
        }

    def _step(self, known: Checked, step: int, reported: Mapping[str, float]) -> None:
        own = {name: value for name, value in reported.items() if not name.startswith(OF_UPDATES)}
        self.samples += own.get("system/replay_buffer_size", math.nan)
        self.batches += 1.0
        self.best = max(self.best, own.get("rollouts/returns_mean", math.nan))
        totals = {
            "rollouts/returns_best_mean": self.best,
            "rollouts/total_rollouts": self.samples,
            "rollouts/batch_step": self.batches,
        }
        self._check(known, self.found.get((step, None), {}), own | totals, f"of step {step}")

    def _final(self, known: Checked, step: int, updates: int) -> None:
        expected = {
            "final/total_steps": float(updates),
            "final/total_batches": self.batches,
            "final/total_rollouts": self.samples,
            "final/best_mean_return": self.best,
        }
        self._check(known, self.found.get((step, None), {}), expected, "of the run")

    def _check(
        self, known: Checked, row: Mapping[str, Any], expected: Mapping[str, float], words: str
    ) -> None:
        for name, value in expected.items():
            actual = row.get(name)
            known.count += 1
            if actual != value:
                number = float(actual) if isinstance(actual, int | float) else math.inf
                known.wrong += 1
                known.broken.append(Broken(f"{name} {words}", value, number))
