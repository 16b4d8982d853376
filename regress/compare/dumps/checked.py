"""A single dump, judged by invariants that hold for every update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from regress.compare.diagnosis.run_context import RunContext
from regress.compare.dumps.contents import samples_of
from regress.compare.dumps.gaps import gaps, lost_steps
from regress.compare.dumps.joined import joined_samples, joined_words
from regress.compare.dumps.listing import Listed, headers
from regress.compare.dumps.match import Sample
from regress.compare.dumps.planning import by_step
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.sides import Side, open_side
from regress.compare.dumps.single import check_single, lost_ranks, single_units
from regress.compare.dumps.unwritten import unwritten
from regress.compare.quantities import STEP_STAGES, source_or_other
from regress.compare.updates.checked import QUANTITY, REASON
from regress.compare.updates.coverage import QUANTITY as COVERAGE
from regress.compare.verdicts.sequence import in_order
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.errors import CompareError

_MASKED = ("forward_data", "is_loss_debug")
_FINITE = (*_MASKED, "loss", "token_gradient", "gradient", "gradient_clipped", "optimizer", "param")
"""Stages in which no value may be NaN or infinite, and those of them where this holds at loss tokens only."""

CHECKSUM = "weights_sha256"
"""Key in the metadata of records: the weights that a rollout was sampled with, or that a forward pass used."""


@dataclass
class Judged:
    """Verdicts on a dump, and of each invariant, by name, why a part of it was not checked."""

    verdicts: list[Verdict] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, name: str, why: str) -> None:
        """Keep why a part of an invariant was not checked."""
        self.left.setdefault(name, []).append(why)


def check_dump(path: str) -> Judged:
    """Judge a dump without golden values: invariants, agreement between ranks, missing ranks and samples in one.

    Args:
        path: a folder or URL of a dump, or a golden case.

    Returns:
        The verdicts in the order of computation, and what was left out.

    Raises:
        DumpError: if there is no dump, or it is damaged.
        CompareError: if it has no records from which anything could be checked.
    """
    open_side.cache_clear()
    side = open_side(path)
    judged, found = Judged(), [*lost_steps(side)]
    sampled: list[Sample] = []
    for step, names in sorted(by_step(side).items()):
        records = headers(side, names)
        for name in names:
            side.verify(name)
        sampled += samples_of(side, [record for record in records if record.key.stage == "trajectory"])
        numbers = {side.entries[record.name][1].update for record in records if _of_update(record)}
        for number in sorted(numbers, key=lambda number: number or 0):
            own = [r for r in records if _of_update(r) and side.entries[r.name][1].update == number]
            found += _checked(path, side, own, Place(step, number), judged)
            found += _in_one(side, own, sampled, Place(step, number))
            if not number:
                found += _weights(records, own, Place(step, number))
    if not found:
        raise CompareError(
            f"nothing in {path} could be checked: record batch_inputs, forward_data, is_loss_debug and loss, with "
            "their token layouts"
        )
    judged.verdicts = in_order(found)
    return judged


def run_context_of_side(side: Side) -> RunContext:
    """Return the run context that a dump tells."""
    places = [where for _, where in side.entries.values()]
    ranks = {where.rank for where in places if where.rank is not None}
    micros = {where.micro for where in places if where.micro is not None}
    return RunContext(
        world_size=len(ranks) or None, micros=len(micros) or None, mesh=side.mesh, config=side.config
    )


def _of_update(record: Listed) -> bool:
    return record.key.stage not in ("trajectory", *STEP_STAGES)


def _in_one(
    side: Side, records: Sequence[Listed], sampled: Sequence[Sample], place: Place
) -> Iterator[Verdict]:
    """Yield a verdict on samples of an update that are several rollouts, one behind the other."""
    there = {key for record in records if record.key.stage == "forward_data" for key in record.samples}
    unknown = there - {sample.key for sample in sampled}
    found = [*joined_samples(side, records, unknown, sampled)] if sampled else []
    if found:
        detail = joined_words(found)
        yield Verdict.fault(Status.COVERAGE, COVERAGE, "samples", place, detail, len(found), count=len(there))


def _checked(
    path: str, side: Side, records: Sequence[Listed], place: Place, judged: Judged
) -> Iterator[Verdict]:
    yield from lost_ranks(side, records, place)
    yield from gaps(side, records, place)
    yield from _unplaced(records, place)
    yield from _not_finite(side, records, place)
    yield from unwritten(side, records, place)
    for unit in single_units((path, path), side, (), records, place, Selection()):
        yield from (finding.verdict for finding in check_single(unit, judged.leave))


def _unplaced(records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on records whose token or shard layout is unusable, so that they cannot be checked."""
    for record in records:
        problem = record.problem
        wrong = next((name for name in record.tensors if record.layout(name) is None), None)
        if not problem and wrong is not None:
            problem = f"{wrong} in {record.key} has no usable shard layout"
        if problem:
            where = Place(place.step, place.update, record.key.rank, record.key.micro)
            yield Verdict.fault(Status.COVERAGE, COVERAGE, record.key.stage, where, problem, 1)


def _not_finite(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on NaN and infinite values in gradients, losses and quantities of loss tokens."""
    captured = bool(side.config.get("capture"))
    for record in (record for record in records if record.key.stage in _FINITE):
        tensors = side.read(record.name).tensors
        mask = tensors.get("effective_valid", tensors.get("response_mask"))
        for name, array in tensors.items():
            if array.dtype.kind in "iub":
                continue
            if record.key.stage in _MASKED:  # values beside the loss tokens may be anything
                if mask is not None and mask.shape == array.shape:
                    array = array[mask.astype(bool)]
                elif mask is not None or not captured or record.key.stage != "forward_data":
                    continue  # of a captured trainer every log-prob is one of its model
            count = array.size - int(np.isfinite(array).sum())
            if count:
                source = source_or_other(record.key.stage, name)
                where = Place(place.step, place.update, record.key.rank, record.key.micro)
                detail = f"{count} of {array.size} values are NaN or infinite"
                yield Verdict.fault(
                    Status.NONFINITE, source.quantity, source.label, where, detail, count, count=array.size
                )


def _weights(records: Sequence[Listed], own: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield a verdict on whether the step's first update uses the weights that sampled, where both are told."""
    rollouts = (record.meta.get(CHECKSUM) for record in records if record.key.stage == "trajectory")
    sampled = next((checksum for checksum in rollouts if checksum is not None), None)
    told = [(record.key, record.meta[CHECKSUM]) for record in own if CHECKSUM in record.meta]
    if sampled is None or not told:
        return
    wrong = next((key for key, found in told if found != sampled), None)
    if wrong is None:
        yield Verdict(Status.OK, QUANTITY, "weights", place, count=len(told), reason=REASON)
        return
    detail = (
        f"{wrong} was computed with other weights than the rollouts were sampled with: {CHECKSUM} differs"
    )
    yield Verdict.fault(Status.DRIFT, QUANTITY, "weights", place, detail, 1, count=len(told))
