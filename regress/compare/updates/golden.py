"""Judgement of one optimizer update: every record against the values expected at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from regress.compare.alignment.keys import Key, norm_of
from regress.compare.alignment.locate import TokenText
from regress.compare.alignment.project import Projection
from regress.compare.diagnosis.beside import NOTHING, Beside
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.dumps.bounds import StoredBounds
from regress.compare.dumps.canonical import golden_at
from regress.compare.dumps.held import HeldRecords, held
from regress.compare.dumps.session import work
from regress.compare.dumps.shares import Group, ShareUnit
from regress.compare.dumps.truth import HeldTruth
from regress.compare.dumps.unit import Unit
from regress.compare.quantities import (
    MICRO_STAGES,
    OPEN_STAGES,
    STEP_STAGES,
    UPDATE_STAGES,
    Kind,
    Source,
    exclusive_stages,
    primary_source,
    quantity_named,
    source_of,
)
from regress.compare.updates.coverage import not_compared
from regress.compare.updates.elements import judge_elements
from regress.compare.updates.plan import Groups, Plan
from regress.compare.updates.record_index import RecordIndex
from regress.compare.updates.replicas import Replicas
from regress.compare.verdicts.case import Case
from regress.compare.verdicts.sequence import in_order
from regress.compare.verdicts.tensor import absent
from regress.compare.verdicts.tolerance import EXACT, Tolerances
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
    beside: Beside | None = NOTHING,
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
        beside: further facts about the update, for failure contexts; None for verdicts without them, where nobody asks
            what is affected.

    Raises:
        CompareError: if the golden values are incomplete, or of other samples than the frame's.
    """
    kept, plan = [*records], Plan.of(planned)
    golden = HeldTruth(truth, frame, place, text, beside or NOTHING)
    placed = RecordIndex(kept, frame)
    actual = HeldRecords(kept, placed, config or {})
    bounds = StoredBounds(tolerances=cache(tolerances), dtypes=dtype or (lambda *_: None))
    with held(golden, actual) as paths:
        explained = beside is not None
        return in_order(
            _Update(paths, golden, actual, placed, plan, bounds, Place(*place), explained).verdicts()
        )


@dataclass(frozen=True)
class _Update:
    """One update: the golden values, the records, and the plan.

    Attributes:
        explained: True if failures tell what is affected.
        compared: tensors that both sides have, by record.
    """

    paths: tuple[str, str]
    truth: HeldTruth
    actual: HeldRecords
    placed: RecordIndex
    plan: Plan
    bounds: StoredBounds
    place: Place
    explained: bool = True
    compared: dict[Key, list[Source]] = field(default_factory=dict)

    @cached_property
    def golden(self) -> Projection:
        """The golden values, able to be projected onto layouts."""
        return golden_at(*self.paths, self.place.step, self.place.update)

    @cached_property
    def names(self) -> Names:
        """Tensors that a record has to hold."""
        return Names(self.golden, self.placed, self.plan)

    def verdicts(self) -> list[Verdict]:
        stages, golden = self.names.micro_stages, self.golden
        found = [
            *self.placed.structure(
                self.plan.holds, self.plan.root, stages, self.place, golden.locator, golden.known_loss_mask
            )
        ]
        for rank, micro in self.plan.micros:
            found += self._microbatch(stages, rank, micro)
        for rank in self.plan.ranks:
            for stage in UPDATE_STAGES:
                found += self._present(Key(stage, rank, None), replace(self.place, rank=rank))
        for key in self.placed.of_stages(STEP_STAGES):
            found += self._present(key, self.place)
        for unit in self._units():
            for finding in work((unit, None)):
                if finding.problem:
                    raise CompareError(finding.problem)
                found.append(finding.verdict)
        groups = Groups(self.placed, self.plan)
        found += Replicas(groups, golden.locator, self.place).verdicts()
        found += judge_elements(groups, golden.truth, golden.locator, self.place)
        judged = [quantity for quantity in golden.truth if self._judged(quantity)]
        return [*found, *not_compared(found, judged, self.place)]

    def _judged(self, quantity: str) -> bool:
        return self.bounds.tolerances(quantity) is not None

    def _microbatch(self, stages: Sequence[str], rank: int, micro: int) -> Iterator[Verdict]:
        place = replace(self.place, rank=rank, micro=micro)
        for stage in stages:
            if self.plan.holds(Key(stage, rank, micro)):
                yield from self._present(Key(stage, rank, micro), place)
        if rank in self.plan.without_loss:
            return
        there = {(source.quantity, source.name) for stage in stages for source in self.golden.stage(stage)}
        for quantity, tensors in self.golden.truth.items():
            for name in tensors:
                if quantity_named(quantity).per_microbatch and (quantity, name) not in there:
                    source = primary_source(quantity, name)
                    yield from self._lost(
                        source, place, Status.MISSING, "no record of this microbatch holds it"
                    )

    def _present(self, key: Key, place: Place) -> Iterator[Verdict]:
        """Yield verdicts on the tensors that one side lacks at a place; those of both sides are compared."""
        record, sources = self.placed.get(key), self.names.of(key)
        if not sources and self.plan.divided and key.stage in self.golden.truth and self._judged(key.stage):
            detail = f"the part of the model on rank {key.rank} has none"
            yield Verdict(Status.OK, key.stage, key.stage, place, detail)
        for source in sources:
            if record is None:
                yield from self._lost(source, place, Status.MISSING, f"{key} was not recorded")
            elif key in self.placed.misfits:
                yield from self._lost(source, place, Status.COVERAGE, self.placed.misfits[key])
            else:
                golden = self.golden.truth.get(source.quantity, {}).get(source.name)
                yield from self._both(key, source, record.tensors.get(source.tensor), golden, place)
        if key.stage == "gradient":
            golden = self.golden.truth.get("grad_norm", {}).get("grad_norm")
            source = Source("gradient", "grad_norm", "grad_norm", "grad_norm")
            yield from self._both(key, source, norm_of(record), golden, place)

    def _lost(self, source: Source, place: Place, status: Status, detail: str) -> Iterator[Verdict]:
        if self._judged(source.quantity):
            yield Verdict(status, source.quantity, source.label, place, detail)

    def _both(
        self, key: Key, source: Source, actual: Array | None, golden: Array | None, place: Place
    ) -> Iterator[Verdict]:
        """Yield a verdict if one side alone has a tensor."""
        if not self._judged(source.quantity):
            return
        if actual is not None and golden is not None:
            self.compared.setdefault(key, []).append(source)
        elif actual is not None or golden is not None:
            tolerance = self.bounds.of(source.quantity, ()).of(source.name)
            case = Case(source.quantity, source.label, place, tolerance or EXACT, None, ())
            yield absent(case, actual, golden)

    def _units(self) -> Iterator[Unit | ShareUnit]:
        """Yield the comparisons of what both sides have."""
        golden = {stage: name for name, (stage, _) in self.truth.entries.items()}
        for key, sources in self.compared.items():
            shares = {s.tensor for s in sources if quantity_named(s.quantity).kind is Kind.SHARE}
            names = tuple(source.tensor for source in sources if source.tensor not in shares)
            record, place = self.actual.name_of(key), replace(self.place, rank=key.rank, micro=key.micro)
            if names:
                yield Unit(
                    *self.paths,
                    record,
                    (golden[key.stage],) if key.stage in UPDATE_STAGES else (),
                    place,
                    key.stage,
                    self.golden.frame,
                    bounds=self.bounds,
                    tensors=names,
                    explained=self.explained,
                )
            if shares:
                group = Group((golden[key.stage],), (record,), place, "", {})
                rest = frozenset(
                    {*self.truth.read(golden[key.stage]).tensors, *self.actual.read(record).tensors} - shares
                )
                yield ShareUnit(*self.paths, key.stage, (group,), bounds=self.bounds, without=rest)


class Names:
    """Tensors that every record of an update holds or should hold."""

    def __init__(self, golden: Projection, placed: RecordIndex, plan: Plan) -> None:
        self._golden = golden
        self._placed = placed
        self._plan = plan
        self._of_parts: dict[tuple[str, int], set[str]] = {}

    @property
    def micro_stages(self) -> list[str]:
        """Stages that every microbatch has: those of the golden values, and those recorded anywhere."""
        names = [(quantity, name) for quantity, tensors in self._golden.truth.items() for name in tensors]
        recorded = {key.stage for key in self._placed.of_stages(MICRO_STAGES)}
        return [stage for stage in MICRO_STAGES if stage in exclusive_stages(names) | recorded]

    def of(self, key: Key) -> list[Source]:
        """Return the tensors that a record holds, in its order, then those that it should hold besides."""
        found = [source_of(key.stage, name) for name in self._recorded(key)]
        known = [source for source in found if source is not None]
        wanted = [*self._golden.stage(key.stage)]
        if not self._plan.repeated:
            told = {name for other in self._placed.of_stages([key.stage]) for name in self._recorded(other)}
            wanted = [source for source in wanted if source.primary or source.tensor in told]
        if key.stage in OPEN_STAGES and self._plan.divided:
            names = self._of_part(key.stage, self._plan.part(key.rank))
            wanted = [source for source in wanted if source.name in names]
        return list(dict.fromkeys([*known, *wanted]))

    def _of_part(self, stage: str, part: int) -> set[str]:
        """Return the names on any rank of a part of the model, or, without a record, all that nobody has."""
        if (stage, part) not in self._of_parts:
            keys = self._placed.of_stages([stage])
            mine = [key for key in keys if self._plan.part(key.rank) == part]
            recorded = {name for key in mine or keys for name in self._recorded(key)}
            golden = set(self._golden.truth.get(stage, {}))
            self._of_parts[stage, part] = recorded if mine else golden - recorded
        return self._of_parts[stage, part]

    def _recorded(self, key: Key) -> list[str]:
        record = self._placed.get(key)
        return [] if record is None else [*record.tensors]
