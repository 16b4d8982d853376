"""Judgement of a replay's rollouts: repeated byte for byte, or sampled anew and then token for token the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from regress.compare.alignment.canonical_tensors import canonicalize
from regress.compare.diagnosis.sampled_tokens import draws_that_differ
from regress.compare.updates.trajectory_judge import MISMATCH, SAMPLER, judge_mismatch, judge_trajectories
from regress.compare.verdicts.tolerance import Tolerance, Tolerances
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_reader import DumpReader, read_all
from regress.dump.metrics_file import METRICS
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.trajectory import to_record
from regress.errors import CompareError
from regress.golden.golden_case import GREEDY, GoldenCase
from regress.replay.case_reads import trajectories_of
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.variant import Precision

SAMPLED = (Precision.FLOAT64, Precision.FLOAT32, Precision.BITWISE)
"""Precisions in which replays of a sampled case sample: in coarser ones other tokens are drawn."""

Truth = Mapping[str, Mapping[str, Array]]


def quantities_of_rollouts(case: GoldenCase, precision: Precision) -> tuple[str, ...]:
    """Return the quantities of a step's rollouts that a replay is judged by, beside the rollouts themselves."""
    if not case.sampled or precision is Precision.BITWISE:
        return ()
    return (SAMPLER, MISMATCH) if precision in SAMPLED else (MISMATCH,)


@dataclass(frozen=True)
class RolloutJudge:
    """The rollouts of a replay beside those of its case.

    Attributes:
        plan: its updates.
        bound: tolerance of each quantity; None leaves it out.
        truth: golden values of an update.
    """

    case: GoldenCase
    dump: DumpReader
    precision: Precision
    plan: Sequence[PlannedUpdate]
    bound: Tolerances
    truth: Callable[[str], Truth]

    def verdicts(self, step: int) -> Iterator[Verdict]:
        """Yield all verdicts on the rollouts of one step."""
        golden, record = to_record(trajectories_of(self.case)[step], step), self._recorded(step)
        sampled = self.case.sampled and self.precision in SAMPLED
        tolerance = self.bound(SAMPLER) if sampled else None
        if sampled and tolerance is None:  # as where other quantities are measured: the tokens alone
            golden, record = _without_log_probs(golden), record and _without_log_probs(record)
        judged = judge_trajectories(record, golden, sampled=tolerance)
        yield from _explained(judged, record, golden, tolerance) if sampled else judged
        if sampled and not self._program:
            greedy = to_record(self.case.greedy()[step], step)
            found = self._greedy(step)
            if tolerance is None:
                greedy, found = _without_log_probs(greedy), found and _without_log_probs(found)
            judged = judge_trajectories(found, greedy, sampled=tolerance, prefix=f"{GREEDY}/")
            yield from _explained(judged, found, greedy, tolerance, greedy=True)
        if MISMATCH in quantities_of_rollouts(self.case, self.precision):
            yield from self._mismatch(step)

    def _recorded(self, step: int) -> Record | None:
        return next(self.dump.records("trajectory", step), None)

    @property
    def _program(self) -> bool:
        """True if the whole program ran, which samples greedily only where it evaluates."""
        return (self._folder / METRICS).exists()

    @property
    def _folder(self) -> Path:
        return Path(str(self.dump.manifest.provenance.config["output_dir"]))

    def _greedy(self, step: int) -> Record | None:
        files = sorted((self._folder / GREEDY).glob(f"step_{step:06d}.*"))
        return read_all(files[0])[0] if files else None

    def _mismatch(self, step: int) -> Iterator[Verdict]:
        """Yield the verdict on the mismatch at the tokens of the step's first update."""
        tolerance = self.bound(MISMATCH)
        update = next((update for update in self.plan if update.step == step), None)
        if tolerance is None or update is None:
            return
        records = [
            record for record in self._records(update) if record.type in ("batch_inputs", "forward_data")
        ]
        try:
            actual = canonicalize(records, update.frame, update.records)["log_probs"]["log_probs"]
            known = self.truth(update.where)["log_probs"]["log_probs"]
        except (CompareError, KeyError) as error:
            detail = f"the log-probs of the first update cannot be put together ({error})"
            yield Verdict(Status.MISSING, MISMATCH, MISMATCH, Place(step), detail)
            return
        golden = to_record(trajectories_of(self.case)[step], step)
        sides = self._recorded(step), golden
        yield judge_mismatch(
            sides, (_spread(actual, update, golden), _spread(known, update, golden)), tolerance
        )

    def _records(self, update: PlannedUpdate) -> Iterator[Record]:
        for record_type in ("batch_inputs", "forward_data"):
            for record in self.dump.records(record_type, update.step):
                if record.update == update.update:
                    yield record


def _explained(
    judged: Sequence[Verdict],
    record: Record | None,
    golden: Record,
    tolerance: Tolerance | None,
    greedy: bool = False,
) -> Iterator[Verdict]:
    """Yield verdicts on rollouts that were sampled; those that fail say what is known of the draws."""
    words: str | None = None
    for verdict in judged:
        if verdict.ok or record is None or verdict.quantity == SAMPLER:
            yield verdict
            continue
        if words is None:
            words = draws_that_differ(record, golden, tolerance, greedy)
        yield replace(verdict, detail="; ".join(part for part in (verdict.detail, words) if part))


def _without_log_probs(record: Record) -> Record:
    kept = {name: array for name, array in record.tensors.items() if name != "log_probs"}
    return Record(record.type, record.step, kept, record.meta)


def _spread(values: Array, update: PlannedUpdate, golden: Record) -> Array:
    """Return the values of an update at the tokens of all rollouts of its step; the samples of others have NaN."""
    rows: list[Mapping[str, object]] = golden.meta["samples"]  # type: ignore[assignment]  # written by to_record
    keys = [
        (str(row["group_id"]), int(run))
        for row, run in zip(rows, golden.tensors["run_id"].tolist(), strict=True)
    ]
    lengths = golden.tensors["lengths"].tolist()
    ends = np.cumsum(lengths)
    found = np.full(int(ends[-1]), np.nan)
    for key, length, end in zip(keys, lengths, ends, strict=True):
        if key in update.frame.index:
            start = int(update.frame.offsets[update.frame.index[key]])
            found[end - length : end] = values[start : start + length]
    return found
