"""Judgement of one optimizer update: every record against the values expected at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from regress.compare.alignment.aligned import judge_aligned
from regress.compare.alignment.keys import Key, norm_of
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.locate import TokenText
from regress.compare.alignment.project import Projection
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.quantities import (
    STEP_STAGES,
    UPDATE_STAGES,
    Kind,
    Source,
    order_of,
    primary_source,
    quantity_named,
)
from regress.compare.updates.coverage import not_compared
from regress.compare.updates.elements import judge_elements
from regress.compare.updates.groups import Groups
from regress.compare.updates.names import Names
from regress.compare.updates.plan import Plan
from regress.compare.updates.record_index import RecordIndex
from regress.compare.updates.replicas import Replicas
from regress.compare.verdicts.case import Case
from regress.compare.verdicts.tensor import absent, judge_tensor
from regress.compare.verdicts.tolerance import EXACT, Tolerance, Tolerances
from regress.compare.verdicts.values import wrong_dtype
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame

Dtype = Callable[[str, str], str | None]


def judge_update(
    records: Iterable[Record],
    truth: Truth,
    frame: TokenFrame,
    tolerances: Tolerances,
    *,
    place: tuple[int, int | None],
    planned: Plan | Sequence[tuple[int, int]],
    dtype: Dtype | None = None,
    text: TokenText | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """Return all verdicts on one optimizer update, in the order of computation.

    Records and tensors are judged by the union of the recorded and the expected ones. A missing record is a
    ``missing`` verdict on each of its tensors at its place. Unplanned and doubled records, and quantities that were not
    compared at all, are verdicts on ``coverage``, beside the proof that every token was computed exactly once. Elements
    on several ranks must be the same bit for bit, and every element must be on some rank: verdicts on ``replicas`` and
    ``coverage``.

    Args:
        records: all records of the update, in any order.
        truth: canonical golden values, ``quantity -> name -> array``.
        frame: the samples of the update.
        tolerances: tolerance of a quantity; None leaves it out.
        place: step, and update within the step (None where it has one).
        planned: every rank and microbatch that had to be computed, and which of them hold the same.
        dtype: name of the dtype that a tensor must have, by golden quantity and name; None for any.
        text: text of a token id.
        config: configuration of the run, nested, for failure contexts and the invariants of its objective.

    Raises:
        CompareError: if the golden values are incomplete, or of other samples than the frame's.
    """
    golden = Projection(truth, frame, text, config)
    placed = RecordIndex(records, frame)
    update = _Update(golden, placed, Plan.of(planned), tolerances, Place(*place), dtype or (lambda *_: None))
    return in_order(update.verdicts())


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts in the order of computation: quantity, then microbatch, rank, and order within the record."""

    def key(verdict: Verdict) -> tuple[int, ...]:
        place = verdict.place
        numbers = (place.step, place.update, order_of(verdict.quantity), place.micro, place.rank)
        return tuple(-1 if number is None else number for number in numbers)

    return sorted(verdicts, key=key)


@dataclass(frozen=True)
class _Update:
    golden: Projection
    placed: RecordIndex
    plan: Plan
    tolerances: Tolerances
    place: Place
    dtype: Dtype

    @cached_property
    def names(self) -> Names:
        """Tensors that a record has to hold."""
        return Names(self.golden, self.placed, self.plan)

    def verdicts(self) -> list[Verdict]:
        stages = self.names.micro_stages
        found = [
            *self.placed.structure(
                self.plan.holds,
                self.plan.root,
                stages,
                self.place,
                self.golden.locator,
                self.golden.known_loss_mask,
            )
        ]
        for rank, micro in self.plan.micros:
            found += self._microbatch(stages, rank, micro)
        for rank in self.plan.ranks:
            found += self._whole(rank)
        for key in self.placed.of_stages(STEP_STAGES):
            found += self._record(key, self.place)
        groups = Groups(self.placed, self.plan)
        found += Replicas(groups, self.golden.locator, self.place).verdicts()
        found += judge_elements(groups, self.golden.truth, self.golden.locator, self.place)
        judged = [quantity for quantity in self.golden.truth if self.tolerances(quantity) is not None]
        return [*found, *not_compared(found, judged, self.place)]

    def _microbatch(self, stages: Sequence[str], rank: int, micro: int) -> Iterator[Verdict]:
        place = replace(self.place, rank=rank, micro=micro)
        for stage in stages:
            if self.plan.holds(Key(stage, rank, micro)):
                yield from self._record(Key(stage, rank, micro), place)
        if rank in self.plan.without_loss:
            return
        local_shard = {
            (source.quantity, source.name) for stage in stages for source in self.golden.stage(stage)
        }
        for quantity, tensors in self.golden.truth.items():
            for name in tensors:
                if quantity_named(quantity).per_microbatch and (quantity, name) not in local_shard:
                    source = primary_source(quantity, name)
                    yield from self._lost(
                        source, place, Status.MISSING, "no record of this microbatch holds it"
                    )

    def _record(self, key: Key, place: Place) -> Iterator[Verdict]:
        """Yield verdicts on every tensor that a record of a microbatch (or of the step) holds or should hold."""
        record = self.placed.get(key)
        layout = self.placed.layouts.get(key)
        sources = self.names.of(key)
        if not sources:
            yield from self._nothing(key, place)
        for source in sources:
            if record is None:
                yield from self._lost(source, place, Status.MISSING, f"{key} was not recorded")
            elif layout is None:
                yield from self._lost(source, place, Status.COVERAGE, self.placed.misfits[key])
            else:
                yield from self._held(source, key, record, place)

    def _whole(self, rank: int) -> Iterator[Verdict]:
        """Yield verdicts on one rank's full tensors, or its shards of them."""
        place = replace(self.place, rank=rank)
        for stage in UPDATE_STAGES:
            key = Key(stage, rank, None)
            record = self.placed.get(key)
            sources = self.names.of(key)
            if not sources:
                yield from self._nothing(key, place)
            for source in sources:
                if record is None:
                    yield from self._lost(source, place, Status.MISSING, f"{key} was not recorded")
                else:
                    yield from self._held(source, key, record, place)
            if stage == "gradient":
                yield from self._grad_norm(record, place)

    def _held(self, source: Source, key: Key, record: Record, place: Place) -> Iterator[Verdict]:
        """Yield the verdict on one tensor that a record has, or should have."""
        actual = record.tensors.get(source.tensor)
        tolerance, case = self._case(source, place, () if actual is None else actual.shape)
        if tolerance is None:
            return
        golden = self.golden.truth.get(source.quantity, {}).get(source.name)
        try:
            shard = None if actual is None else local_shard(key, record, source.tensor)
        except CompareError as error:
            yield Verdict(Status.COVERAGE, source.quantity, source.label, place, str(error))
            return
        if shard is None or golden is None:
            yield self._absent(case, source, key, actual, golden)
        elif quantity_named(source.quantity).kind is Kind.SHARE:
            yield self._share(source, shard.array, key, tolerance, place)
        else:
            yield self._judged(case, source, key, shard, golden)

    def _case(self, source: Source, place: Place, shape: tuple[int, ...]) -> tuple[Tolerance | None, Case]:
        """Return the tolerance of a tensor, None for one that is not judged, and what is known of its verdict."""
        known = self.tolerances(source.quantity)
        tolerance = None if known is None else known.of(source.name)
        return tolerance, Case(source.quantity, source.label, place, tolerance or EXACT, None, shape)

    def _judged(self, case: Case, source: Source, key: Key, shard: Shard, golden: Array) -> Verdict:
        """Return the verdict on a tensor that both sides have."""
        if key.stage in UPDATE_STAGES:
            found = self.golden.whole(source, shard)
        else:
            layout, rows = self.placed.layouts[key], self.placed.rows(key)
            context = partial(self.golden.context, layout=layout, rows=rows)
            found = self.golden.tokens(source, shard, self.placed.places(key), context)
        dtype = self.dtype(source.quantity, source.name)
        if isinstance(found, str):
            wrong = wrong_dtype(case, shard.array, golden, dtype)
            return wrong or case.verdict(Status.SHAPE, detail=found)
        return judge_aligned(replace(case, words=found.words), found, self.golden.scale(source), dtype)

    def _absent(
        self, case: Case, source: Source, key: Key, actual: Array | None, golden: Array | None
    ) -> Verdict:
        """Return the verdict on a tensor that one side lacks."""
        if golden is not None and key.stage not in UPDATE_STAGES:
            shape = self.golden.shape(source, self.placed.places(key))
            golden = np.broadcast_to(np.zeros((), golden.dtype), shape)
        return absent(case, actual, golden)

    def _share(self, source: Source, actual: Array, key: Key, tolerance: Tolerance, place: Place) -> Verdict:
        """Return the verdict on a microbatch's part of a sum."""
        canonical, _ = self.placed.layouts[key].indices(self.golden.frame.offsets)
        expected, scale, words = self.golden.share(source.name, canonical)
        return judge_tensor(
            actual,
            expected,
            tolerance,
            quantity=source.quantity,
            name=source.label,
            place=place,
            scale=scale,
            dtype=self.dtype(source.quantity, source.name),
            locate=words,
        )

    def _grad_norm(self, record: Record | None, place: Place) -> Iterator[Verdict]:
        """Yield the verdict on the norm, a number in the metadata of the gradients without a dtype of its own."""
        source = Source("gradient", "grad_norm", "grad_norm", "grad_norm")
        golden = self.golden.truth.get("grad_norm", {}).get("grad_norm")
        actual = norm_of(record)
        tolerance, _ = self._case(source, place, ())
        if tolerance is not None and (golden is not None or actual is not None):
            expected = None if golden is None else golden.astype(np.float64)
            yield judge_tensor(
                actual,
                expected,
                tolerance,
                quantity="grad_norm",
                name="grad_norm",
                place=place,
                dtype="float64",
            )

    def _lost(self, source: Source, place: Place, status: Status, detail: str) -> Iterator[Verdict]:
        if self.tolerances(source.quantity) is not None:
            yield Verdict(status, source.quantity, source.label, place, detail)

    def _nothing(self, key: Key, place: Place) -> Iterator[Verdict]:
        """Yield an ok verdict for a rank's part of the model that has no tensors of a stage."""
        if self.plan.divided and key.stage in self.golden.truth and self.tolerances(key.stage) is not None:
            detail = f"the part of the model on rank {key.rank} has none"
            yield Verdict(Status.OK, key.stage, key.stage, place, detail)
