"""Places of an update that must have a record, the tensors that it must hold, and verdicts on those that are not there.

A plan says it of a replay, whose golden values are of no layout; of what repeats a bitwise reference, the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.token_places import Mask
from regress.compare.coverage import QUANTITY, judge_coverage
from regress.compare.quantities import (
    METRICS,
    MICRO_TYPES,
    NEW,
    OPEN_TYPES,
    STEP_TYPES,
    UPDATE_TYPES,
    QuantitySource,
    exclusive_types,
    primary_source,
    quantity_named,
    source_of,
)
from regress.compare.record_header import Header
from regress.compare.record_plan import Plan
from regress.compare.update_records import Records, tokens_of
from regress.compare.verdicts.tensor_case import Case
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place

NORM = QuantitySource("gradient", "grad_norm", "grad_norm", "grad_norm")
"""The norm in the metadata of gradients, which is asked for like a tensor of theirs."""


@dataclass(frozen=True)
class Expected:
    """The places of an update, and the tensors that the records there must hold.

    Attributes:
        golden: golden values as one record of each type, or the records of a bitwise reference.
        plan: places of a replay; None for those of the reference.
        loss: loss tokens ``[frame.size]``; None where nothing tells them: all tokens that have a predecessor.
    """

    golden: Records
    actual: Records
    plan: Plan | None
    loss: Mask | None
    _of_parts: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    @cached_property
    def record_types(self) -> list[str]:
        """Types whose tokens must be complete: those of the golden side, and those recorded anywhere."""
        known = {key.record_type for key in (*self.golden.all, *self.actual.all)}
        if (
            self.plan is not None
        ):  # golden values of no record type in particular may be in any that can hold them
            recorded = {key.record_type for key in self.actual.all}
            known = exclusive_types(self._values) | recorded
        return [record_type for record_type in MICRO_TYPES if record_type in known]

    @cached_property
    def _values(self) -> list[tuple[str, str]]:
        """Quantity and name of all golden tensors."""
        sources = (source_of(h.key.record_type, name) for h in self.golden.headers for name in h.tensors)
        return list(dict.fromkeys((s.quantity, s.name) for s in sources if s is not None))

    def holds(self, key: Key) -> bool:
        """Return True if a record belongs there."""
        return key in self.golden.all if self.plan is None else self.plan.holds(key)

    def places(self) -> Iterator[Key]:
        """Yield every place that is judged: all that are expected, and those of recorded values of the step."""
        if self.plan is None:
            record_types = (*STEP_TYPES, *MICRO_TYPES, *UPDATE_TYPES)
            yield from (key for record_type in record_types for key in self.golden.of_types([record_type]))
            return
        micros = (Key(record_type, *at) for at in self.plan.micros for record_type in self.record_types)
        yield from (key for key in micros if self.plan.holds(key))
        yield from (Key(record_type, rank, None) for rank in self.plan.ranks for record_type in UPDATE_TYPES)
        yield from self.actual.of_types(STEP_TYPES)

    def beside(self, key: Key) -> Header | None:
        """Return the golden record that one at a place is compared with."""
        keys = [key] if self.plan is None else self.golden.of_types([key.record_type])
        return self.golden.header(keys[0]) if keys else None

    def sources(self, key: Key) -> list[QuantitySource]:
        """Return the tensors that a record holds, in its order, then those that it should hold besides."""
        recorded, expected = ([*_sources(header)] for header in (self.actual.header(key), self.beside(key)))
        if self.plan is not None and not self.plan.repeated:
            recorded_names = {*self.actual.names(self.actual.of_types([key.record_type]))}
            expected = [source for source in expected if source.primary or source.tensor in recorded_names]
        if self.plan is not None and key.record_type in OPEN_TYPES and self.plan.divided:
            names = self._of_part(self.plan, key.record_type, self.plan.part(key.rank))
            expected = [source for source in expected if source.name in names]
        return list(dict.fromkeys([*recorded, *expected]))

    def _of_part(self, plan: Plan, record_type: str, part: int) -> set[str]:
        """Return the names on any rank of a part of the model, or, without a record, all that nobody has."""
        if (record_type, part) not in self._of_parts:
            keys = self.actual.of_types([record_type])
            mine = [key for key in keys if plan.part(key.rank) == part]
            recorded = {*self.actual.names(mine or keys)}
            golden = {*self.golden.names(self.golden.of_types([record_type]))}
            self._of_parts[record_type, part] = recorded if mine else golden - recorded
        return self._of_parts[record_type, part]

    def refused(self, key: Key) -> str:
        """Return why nothing of a recorded place can be compared; empty if it can."""
        mine, theirs = self.actual.all[key][0], self.beside(key)
        if key in self.actual.misfits or self.plan is not None or theirs is None:
            return self.actual.misfits.get(key, "")
        what = ""
        if (mine.spans, mine.rows) != (theirs.spans, theirs.rows):
            what = f"the tokens of {key} lie elsewhere than in"
        elif mine.shards != theirs.shards:
            what = f"{key} holds other shards than"
        return f"{what} its bitwise reference, so bytes cannot be compared" if what else ""

    def homeless(self) -> Iterator[tuple[QuantitySource, Place]]:
        """Yield golden tensors that no record of a microbatch could hold, each with rank and microbatch."""
        if self.plan is None:
            return
        headers = (header for header in self.golden.headers if header.key.record_type in self.record_types)
        there = {(source.quantity, source.name) for header in headers for source in _sources(header)}
        lacking = [value for value in self._values if value not in there]
        lacking = [value for value in lacking if quantity_named(value[0]).per_microbatch]
        for rank, micro in self.plan.micros:
            if rank not in self.plan.without_loss:
                yield from ((primary_source(*value), Place(rank=rank, micro=micro)) for value in lacking)


@dataclass(frozen=True)
class AtPlaces:
    """The records of an update at the places where they must be.

    Attributes:
        tolerance: tolerance of a tensor, None for one that is not judged.
        compared: receives the tensors that both sides have, by record.
    """

    expected: Expected
    actual: Records
    place: Place
    tolerance: Callable[[QuantitySource], Tolerance | None]
    compared: dict[Key, list[QuantitySource]] = field(default_factory=dict)

    def verdicts(self, locator: Locator) -> Iterator[Verdict]:
        """Yield verdicts on the set of records, their tokens, and each tensor that one side lacks."""
        yield from self._set_of_records()
        for record_type in self.expected.record_types:
            expected = tokens_of(record_type, self.actual.frame, self.expected.loss)
            found = self.actual.once(record_type)
            yield judge_coverage(
                record_type, found, self.actual.frame, self.place, locator, expected=expected
            )
        for key in self.expected.places():
            yield from self._record(key)
        for source, at in self.expected.homeless():
            place = replace(self.place, rank=at.rank, micro=at.micro)
            yield from self._fault(source, place, Status.MISSING, "no record of this microbatch holds it")

    def _set_of_records(self) -> Iterator[Verdict]:
        for key, found in self.actual.all.items():
            if len(found) > 1:
                detail = f"{key} was recorded {len(found)} times; only the first record was compared"
                yield Verdict(Status.COVERAGE, QUANTITY, str(key), self.place, detail)
            if not self.expected.holds(key):
                detail = f"{key} was recorded, but is not part of the plan"
                yield Verdict(Status.EXTRA, QUANTITY, str(key), self.place, detail)
            for name in found[0].tensors:
                if source_of(key.record_type, name) is None:
                    detail = f"{key} holds a tensor {name!r} that belongs to no quantity"
                    yield Verdict(Status.EXTRA, QUANTITY, f"{key.record_type}/{name}", self.place, detail)

    def _record(self, key: Key) -> Iterator[Verdict]:
        header, sources = self.actual.header(key), self.expected.sources(key)
        place = replace(self.place, rank=key.rank, micro=key.micro)
        golden, plan = self.expected.beside(key), self.expected.plan
        whole = QuantitySource(key.record_type, key.record_type, key.record_type, key.record_type)
        if not sources and golden is not None and plan is not None and plan.divided and self.tolerance(whole):
            detail = f"the part of the model on rank {key.rank} has none"
            yield Verdict(Status.OK, key.record_type, key.record_type, place, detail)
        refused = "" if header is None else self.expected.refused(key)
        for source in sources:
            if header is None:
                yield from self._fault(source, place, Status.MISSING, f"{key} was not recorded")
            elif refused:
                yield from self._fault(source, place, Status.COVERAGE, refused)
            else:
                yield from self._tensor(key, source, place)
        if key.record_type == "gradient":
            yield from self._tensor(key, NORM, place)

    def _tensor(self, key: Key, source: QuantitySource, place: Place) -> Iterator[Verdict]:
        tolerance = self.tolerance(source)
        if tolerance is None:
            return
        golden, actual = (_described(h, source) for h in (self.expected.beside(key), self.actual.header(key)))
        case = Case(source.quantity, source.label, place, tolerance, None, ())
        if golden and actual:
            self.compared.setdefault(key, []).append(source)
        elif golden:
            detail = f"golden {golden}, and nothing of this name was recorded"
            yield case.verdict(Status.MISSING, detail=detail)
        elif actual and source.quantity in METRICS:
            yield case.verdict(Status.OK, detail=NEW)
        elif actual:
            yield case.verdict(Status.EXTRA, detail=f"actual {actual}, and no golden of this name")

    def _fault(self, source: QuantitySource, place: Place, status: Status, detail: str) -> Iterator[Verdict]:
        if self.tolerance(source) is not None:
            yield Verdict(status, source.quantity, source.label, place, detail)


def _sources(header: Header | None) -> Iterator[QuantitySource]:
    """Yield the tensors of a record that belong to a quantity."""
    names = () if header is None else header.tensors
    found = (source_of(header.key.record_type, name) for name in names if header is not None)
    yield from (source for source in found if source is not None)


def _described(header: Header | None, source: QuantitySource) -> str:
    """Return dtype and shape of a tensor of a record, or of the norm in its metadata; empty without one."""
    if header is None:
        return ""
    if source is NORM:
        return "float64 []" if isinstance(header.meta.get("grad_norm"), int | float) else ""
    dtype, shape = header.tensors.get(source.tensor, ("", ()))
    return f"{dtype} {[*shape]}" if dtype else ""
