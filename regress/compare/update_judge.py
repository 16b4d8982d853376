"""Judgement of one optimizer update at known places: against golden values, or byte for byte against a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from regress.compare.alignment.element_names import Locator, TokenText
from regress.compare.alignment.record_keys import Key
from regress.compare.coverage import judge_elements, not_compared
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.dumps.canonical_values import golden_at
from regress.compare.dumps.comparison import serial, work
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.loss_shares import Group, ShareUnit
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.record_listing import headers
from regress.compare.dumps.scaled_verdicts import examined
from regress.compare.dumps.tolerance_bounds import Bounds, StoredBounds
from regress.compare.dumps.truth_source import InMemoryTruth, TruthSide
from regress.compare.expected_records import AtPlaces, Expected
from regress.compare.quantities import MASKS, UPDATE_TYPES, Kind, QuantitySource, quantity_named
from regress.compare.record_plan import Plan
from regress.compare.replica_agreement import Replicas
from regress.compare.update_records import Records
from regress.compare.verdicts.tolerance import BITWISE, EXACT, Tolerance, Tolerances
from regress.compare.verdicts.verdict import Verdict
from regress.compare.verdicts.verdict_sequence import in_order
from regress.dump.coordinates import Coordinates, Place
from regress.dump.record import Record
from regress.dump.source_readers import Source
from regress.errors import CompareError
from regress.layout import SampleKey, TokenFrame

Dtype = Callable[[str, str], str | None]


def judge_update(
    records: Iterable[Record],
    truth: Truth,
    frame: TokenFrame,
    tolerances: Tolerances,
    *,
    place: Place,
    planned: Plan | Sequence[tuple[int, int]],
    dtype: Dtype | None = None,
    text: TokenText | None = None,
    config: Mapping[str, Any] | None = None,
    related: RelatedValues | None = NOTHING,
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
        place: the update.
        planned: every rank and microbatch that had to be computed, and which of them hold the same.
        dtype: name of the dtype that a tensor must have, by golden quantity and name; None for any.
        text: text of a token id.
        config: configuration of the run, nested, for failure contexts and the invariants of its objective.
        related: further facts about the update, for failure contexts; None for verdicts without them, where nobody asks
            what is affected.

    Raises:
        CompareError: if the golden values are incomplete, or of other samples than the frame's.
    """
    plan = Plan.of(planned)
    bounds = StoredBounds(tolerances=cache(tolerances), dtypes=dtype or (lambda *_: None))
    golden, actual = InMemoryTruth(truth, frame, place, text, related or NOTHING), Memory([*records], config)
    values = golden_at(golden, actual, place)
    update = _Update((golden, actual), frame, place, plan, bounds, related is not None)
    expected = Expected(update.golden, update.actual, plan, values.known_loss_mask)
    found = update.verdicts(expected, values.locator)
    found += judge_elements(update.actual, plan, values.truth, values.locator, update.place)
    judged = [quantity for quantity in truth if bounds.tolerances(quantity) is not None]
    return in_order([*found, *not_compared(found, judged, update.place)])


def judge_bitwise(
    records: Iterable[Record],
    reference: Iterable[Record],
    frame: TokenFrame,
    *,
    place: Place,
    planned: Plan | None = None,
    text: TokenText | None = None,
) -> list[Verdict]:
    """Return all verdicts on one optimizer update whose every byte, padding included, must equal its bitwise reference.

    Records and tensors are judged by the union of both sides, in the order of computation; ``golden`` in a verdict is
    the bitwise reference. ``planned`` tells which ranks repeat each other's tokens; by default none does. See
    `judge_update` for the other arguments.
    """
    golden, actual = Memory([*reference], text=text), Memory([*records])
    bounds = Bounds(BITWISE)
    update = _Update((golden, actual), frame, place, planned or Plan(()), bounds, False)
    recorded = update.golden.recorded
    expected = Expected(update.golden, update.actual, None, recorded.loss)
    return in_order(update.verdicts(expected, Locator(frame, recorded.ids, text)))


@dataclass(frozen=True)
class _Update:
    """An update in memory: the golden side, the actual one, and the plan.

    Attributes:
        explained: True if failures tell what is affected.
    """

    sides: tuple[Side, Side]
    frame: TokenFrame
    place: Place
    plan: Plan
    bounds: Bounds
    explained: bool

    @cached_property
    def golden(self) -> Records:
        """The golden records."""
        return self._records(self.sides[0])

    @cached_property
    def actual(self) -> Records:
        """The actual records."""
        return self._records(self.sides[1])

    def _records(self, side: Side) -> Records:
        return Records(headers(side, side.entries), side.read, self.frame, self.plan.root)

    def verdicts(self, expected: Expected, locator: Locator) -> list[Verdict]:
        """Return verdicts on what is there, on its values, and on what several ranks hold."""
        places = AtPlaces(expected, self.actual, self.place, self._tolerance)
        found = [*places.verdicts(locator)]
        results = []
        for key, sources in places.compared.items():
            golden = expected.beside(key)
            units = self._units(key, () if golden is None else (golden.name,), sources)
            results += [(unit, work((unit, None))) for unit in units]
        for finding in (finding for _, findings in results for finding in findings):
            if finding.problem:
                raise CompareError(finding.problem)
            found.append(finding.verdict)
        found += Replicas(self.actual, locator, self.place).verdicts()
        return examined(found, results, serial)

    def _tolerance(self, source: QuantitySource) -> Tolerance | None:
        if isinstance(self.bounds, StoredBounds) and self.bounds.tolerances(source.quantity) is None:
            return None
        return self.bounds.of(source.quantity, ()).of(source.name) or EXACT

    def _units(
        self, key: Key, golden: tuple[str, ...], sources: Sequence[QuantitySource]
    ) -> Iterator[Unit | ShareUnit]:
        """Yield the comparisons of what both sides have of a record: of a reference, byte for byte."""
        record = self.actual.all[key][0]
        unit = Unit(
            *self.sides,
            record.name,
            golden,
            replace(self.place, rank=key.rank, micro=key.micro),
            key.record_type,
            bounds=self.bounds,
            explained=self.explained,
        )
        if key.record_type not in UPDATE_TYPES:
            unit = replace(unit, frame=self.frame, golden_of=self._same)
        if not isinstance(self.sides[0], TruthSide):
            telling = tuple(self.golden.all[at][0].name for at in self.golden.of_types(MASKS))
            yield replace(unit, telling=telling, tensors=_names(sources), elementwise=True)
            return
        shares = [s for s in sources if quantity_named(s.quantity).kind is Kind.SHARE]
        rest = [source for source in sources if source not in shares]
        if rest:
            yield replace(unit, tensors=_names(rest), planned=True)
        if shares:
            group = Group(golden, (record.name,), unit.place, "", self._same)
            names = {*record.tensors, *(name for one in self.golden.headers for name in one.tensors)}
            without = frozenset(names - {*_names(shares)})
            yield ShareUnit(*self.sides, key.record_type, (group,), bounds=self.bounds, without=without)

    @cached_property
    def _same(self) -> dict[SampleKey, SampleKey]:
        return {sample: sample for sample in self.frame.samples}


def _names(sources: Iterable[QuantitySource]) -> tuple[str, ...]:
    return tuple(source.tensor for source in sources)


class Memory(Source):
    """Records of an update.

    Args:
        text: text of a token id, if it is known.
    """

    system = "regress"
    folder = Path("records in memory")

    def __init__(
        self,
        records: Sequence[Record],
        config: Mapping[str, Any] | None = None,
        text: TokenText | None = None,
    ) -> None:
        self.config, self.text = config or {}, text
        self._records = {f"{record.type}/{number}": record for number, record in enumerate(records)}

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Type and place of each record."""
        return {name: (record.type, record.where) for name, record in self._records.items()}

    def read(self, name: str) -> Record:
        """Return one record."""
        return self._records[name]

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True: nothing limits what is recorded."""
        return True
