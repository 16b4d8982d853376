"""A unit with its records, read: its tensors beside their golden values, and their verdicts by a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.shard_overlap import shard_blocks, words_of
from regress.compare.alignment.token_overlap import Index, Part
from regress.compare.alignment.token_places import Mask, Placed, Places, placed, selected_rows
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.canonical_values import golden_at, golden_update
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import text_of
from regress.compare.dumps.opened_dump import Side, open_side, precisions
from regress.compare.dumps.record_listing import header, record_of, recorded_by
from regress.compare.dumps.sample_matching import numbered
from regress.compare.dumps.scaled_verdicts import Defect, Finding
from regress.compare.dumps.tolerance_bounds import coarsest, widened
from regress.compare.dumps.truth_source import TruthSide
from regress.compare.metrics.striped_measures import Measures
from regress.compare.quantities import (
    EVERYWHERE,
    METRICS,
    RECOVERABLE,
    UPDATE_TYPES,
    Kind,
    QuantitySource,
    quantity_named,
    source_or_other,
)
from regress.compare.update_records import words_at
from regress.compare.verdicts.tensor_case import Case, Locate, element
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, ShardLayout


def opened(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> UnitWork:
    """Return a unit with its records, read; see `regress.compare.dumps.unit_comparison.compare_unit`."""
    return UnitWork(unit, UnitRecords.of(unit), scales or {})


class Admission(Protocol):
    """Differences beyond the tolerance of a quantity that rounding decides, so that both sides are right."""

    def __init__(self, work: UnitWork) -> None: ...

    def admit(self, source: QuantitySource, finding: Finding, found: Aligned) -> Finding:
        """Return the finding on a tensor without what rounding decides; the same finding where nothing is."""


@dataclass(frozen=True)
class UnitWork:
    """A unit with its records."""

    unit: Unit
    records: UnitRecords
    scales: Mapping[tuple[str, str], float]

    def sources(self) -> Iterator[QuantitySource]:
        """Yield the tensors of the actual record that are compared."""
        chosen = None if self.unit.tensors is None else {*self.unit.tensors}
        for name in self.records.actual.tensors:
            source = source_or_other(self.unit.record_type, name)
            if not self._is_asked(source):
                continue
            if (chosen is None or name in chosen) and self.unit.only.has(source.quantity, source.label):
                yield source

    def _is_asked(self, source: QuantitySource) -> bool:
        asked = self.unit.examined
        return not asked or (source.quantity, source.label + self.unit.suffix) in asked

    def golden_shards(self, source: QuantitySource) -> list[Shard]:
        """Return the parts of a full tensor that the golden records hold."""
        own = [record for record in self.records.golden.values() if source.tensor in record.tensors]
        return [local_shard(key_of(record), record, source.tensor) for record in own]

    def beside(self, source: QuantitySource, actual: Shard, golden: Sequence[Shard]) -> Aligned:
        """Return a full tensor or a shard of it beside the golden shards."""
        part = actual.layout
        whole = self.records.words(source, part.shape) if self.unit.elementwise else None
        words = words_of(part, whole or partial(element, shape=part.shape, name=source.label))
        pairs = partial(shard_blocks, actual, golden)
        around = self._if_explained(lambda: self.records.projection.context_of_whole(source, part))
        return Aligned(actual.array, golden[0].array, pairs, words, around)

    def _if_explained(self, around: Callable[[], FailureContext]) -> Callable[[], FailureContext] | None:
        """Return the function, with hypotheses if they are asked, unless nobody asks what is affected."""
        if not self.unit.explained:
            return None
        return around if self.unit.examined else lambda: around().without_hypotheses()

    @property
    def by_table(self) -> bool:
        """True if tolerances are those of the table: neither measured for a golden case nor given."""
        return not self.unit.planned and self.unit.bounds.given is None

    def aligned(self) -> Iterator[tuple[QuantitySource, Aligned | str]]:
        """Yield tensors of tokens beside their golden counterparts, or the reason why one cannot be placed."""
        ids, loss = self.records.golden_tokens()
        actual_loss = self.records.actual_loss(loss)
        locator = Locator(self.unit.frame, ids, text_of(self.records.golden_side, self.records.actual_side))
        for source in self.sources():
            if quantity_named(source.quantity).kind is Kind.SHARE:
                continue  # shares belong to microbatches, not to tokens
            golden, by_loss, wrong = self.records.golden_rows(source, loss)
            found = self.records.placed(None, source, actual_loss, rows_only=by_loss)
            if isinstance(found, str):
                yield source, found if wrong is None else Defect(wrong)
            elif wrong is not None:
                yield source, wrong
            elif other := next((p for p in golden if p.inner.shape != found.part.inner.shape), None):
                row, its = list(other.inner.shape), list(found.part.inner.shape)
                yield source, f"golden rows of the shape {row}, actual ones of the shape {its}"
            elif golden:
                whole = locator.rows(found.tokens, found.part.inner.shape, found.columns)
                words = words_of(found.layout, whole)
                around = self._if_explained(partial(self.records.context, source, found))
                mask = source.quantity == "batch_inputs" and source.name.endswith("_mask")
                if mask and self.unit.planned:
                    yield source, _everywhere(found, golden[0], words, around)
                else:
                    rows = TokenRows(found.part, golden, self._selected(source, found, loss))
                    yield source, Aligned.of_tokens(rows, words, around)

    def _selected(self, source: QuantitySource, found: Placed, loss: Mask | None) -> Index:
        """Return the local rows whose values count: not those that rounding hides on one side."""
        selected = selected_rows(source, found.part.rows, loss)
        hidden = (
            self.records.hidden
            if source.record_type == "token_gradient" and source.quantity in EVERYWHERE
            else None
        )
        if hidden is None or not hidden.size:
            return selected
        return selected[~np.isin(found.part.rows[selected], hidden)]

    def tolerance(self, source: QuantitySource, *arrays: Array) -> Tolerance:
        """Return the tolerance of a tensor, widened by the error of estimated values."""
        found = self.tolerance_of(source.quantity, *arrays).of(source.name)
        if self.unit.bounds.given is not None or not self._estimates:
            return found
        return widened(
            found, source.tensor, [self.records.actual.meta], [r.meta for r in self.records.golden.values()]
        )

    @cached_property
    def _estimates(self) -> bool:
        return any(
            "accuracy" in record.meta for record in (self.records.actual, *self.records.golden.values())
        )

    def tolerance_of(self, quantity: str, *arrays: Array) -> Tolerance:
        key = quantity, *(array.dtype for array in arrays)
        if key not in self._tolerances:
            exact = arrays and not any(is_float(array.dtype) for array in arrays)
            # ids and masks are no less exact for the models' precision
            models = () if exact else precisions((self.records.golden_side, self.records.actual_side))
            dtypes = (dtype_name(array.dtype) for array in arrays)
            self._tolerances[key] = self.unit.bounds.of(quantity, [*dtypes, *models])
        return self._tolerances[key]

    @cached_property
    def _tolerances(self) -> dict[tuple[Any, ...], Tolerance]:
        return {}

    def dtype(self, *arrays: Array) -> str:
        """Return the coarsest dtype of some arrays and of the models."""
        models = precisions((self.records.golden_side, self.records.actual_side))
        return self.unit.bounds.precision or coarsest([*models, *(dtype_name(one.dtype) for one in arrays)])

    def judged(self, source: QuantitySource, found: Aligned, other: Tolerance | None = None) -> Finding:
        tolerance = other or self.tolerance(source, found.actual, found.golden)
        label = source.label + self.unit.suffix
        case = Case(source.quantity, label, self.unit.place, tolerance, found.words, found.actual.shape)
        seen: list[Measures] = []
        dtype = self.unit.bounds.dtype(source.quantity, source.name)
        verdict = judge_aligned(case, found, self._scale(source, label), dtype, seen)
        floats = is_float(found.golden.dtype)
        alike = sum(one.count - one.finite - one.mismatched for one in seen) if floats else 0
        return Finding(verdict, tolerance, nonfinite=alike)

    def _scale(self, source: QuantitySource, label: str) -> float | None:
        """Return the largest golden value over all records, as far as it is known."""
        given = self.unit.bounds.given
        bitwise = given is not None and given.bitwise
        if isinstance(self.records.golden_side, TruthSide) or (source.quantity in METRICS and not bitwise):
            return self.records.update.scale(source)
        return self.scales.get((source.quantity, label))

    def plain(self, status: Status, source: QuantitySource, detail: str) -> Finding:
        tolerance = self.tolerance_of(source.quantity).of(source.name)
        name = source.label + self.unit.suffix
        case = Case(source.quantity, name, self.unit.place, tolerance, None, ())
        return Finding(case.verdict(status, detail=detail), tolerance)


def _everywhere(
    found: Placed, golden: Part, words: Locate, around: Callable[[], FailureContext] | None
) -> Aligned:
    """Return a mask beside its golden values, which are 0 in padding."""
    values, at = golden.array.reshape(-1), golden.find(found.tokens)
    known = np.where(at >= 0, values[at], values.dtype.type(0)).reshape(found.layout.shape)
    shard = Shard(found.part.array.reshape(found.part.shape), found.layout)
    pairs = partial(shard_blocks, shard, (Shard(known, ShardLayout.whole(known.shape)),))
    return Aligned(shard.array, values, pairs, words, around)


@dataclass(frozen=True)
class UnitRecords:
    """One actual record, and the golden records of the same tokens or tensors by name."""

    unit: Unit
    golden_side: Side
    actual_side: Side
    golden: Mapping[str, Record]
    actual: Record

    @classmethod
    def of(cls, unit: Unit) -> UnitRecords:
        """Read the records of a unit.

        Raises:
            DumpError: if a file cannot be read.
        """
        golden, actual = open_side(unit.golden), open_side(unit.actual)
        records = {name: record_of(golden, name) for name in unit.records}
        return cls(unit, golden, actual, records, record_of(actual, unit.record))

    @cached_property
    def hidden(self) -> Index:
        """Tokens whose gradient could not be recovered, on either side; their recorded value is 0 whatever it was."""
        if self.unit.planned:
            return np.zeros(0, np.int64)  # ranks of our engine have the exact derivatives
        lost = [np.zeros(0, np.int64)]
        for name, record in ((None, self.actual), *self.golden.items()):
            if RECOVERABLE.tensor in record.tensors:
                found = self.placed(name, RECOVERABLE, None)
                if not isinstance(found, str):
                    lost.append(found.part.rows[~found.part.array.reshape(-1).astype(bool)])
        tokens = np.unique(np.concatenate(lost))
        return tokens[tokens >= 0]

    def golden_rows(self, source: QuantitySource, loss: Mask | None) -> tuple[list[Part], bool, str | None]:
        """Return golden values as rows, True if these are those of loss tokens, and why some cannot be placed."""
        if self.unit.planned:
            part = self.update.part(source)
            return [part], part.rows.size != self.unit.frame.size, None
        names = [name for name, record in self.golden.items() if source.tensor in record.tensors]
        found = [self.placed(name, source, loss) for name in names]
        known = [one for one in found if not isinstance(one, str)]
        wrong = next((one for one in found if isinstance(one, str)), None)
        return [one.part for one in known], any(one.by_loss for one in known), wrong

    def golden_tokens(self) -> tuple[Index | None, Mask | None]:
        """Return golden token ids and loss tokens, both ``[frame.size]``, as far as records tell them."""
        if self.unit.planned:
            return self.update.locator.token_ids, self.update.known_loss_mask
        return recorded_by(self.unit.golden, self.unit.telling, self._indices[0], self.unit.frame)[:2]

    def actual_loss(self, loss: Mask | None) -> Mask | None:
        """Return the loss tokens that the actual records tell; of a plan those of the golden ones."""
        if self.unit.planned:
            return loss
        telling = self.unit.actual, self.unit.actual_telling
        return recorded_by(*telling, self._indices[1], self.unit.frame).loss

    def placed(
        self, name: str | None, source: QuantitySource, loss: Mask | None, *, rows_only: bool = False
    ) -> Placed | str:
        """Return a tensor of a golden record (None: the own one) as rows of tokens, or why it cannot be placed."""
        record = self.actual if name is None else self.golden[name]
        try:
            return placed(record, source, self._places(name), loss, rows_only=rows_only)
        except CompareError as error:
            return str(error)

    def words(self, source: QuantitySource, shape: tuple[int, ...]) -> Locate | None:
        """Return canonical words for the elements of the whole of an actual tensor; None where nothing tells them."""
        if not self.unit.frame.size:
            return None
        ids, loss = self.golden_tokens()
        locator = Locator(self.unit.frame, ids, text_of(self.golden_side, self.actual_side))
        return words_at(self._places(None), source.quantity, shape, locator, loss)

    def _places(self, name: str | None) -> Places:
        if name not in self._known_places:
            (mine, its), unit = self._indices, self.unit
            if name is not None:
                found = header(unit.golden, name).places(mine, unit.frame)
            else:
                found = header(unit.actual, unit.record).places(its, unit.frame)
            self._known_places[name] = found
        return self._known_places[name]

    @cached_property
    def _known_places(self) -> dict[str | None, Places]:
        return {}

    @cached_property
    def _indices(self) -> tuple[dict[SampleKey, int], dict[SampleKey, int]]:
        """Return the frame numbers of the golden and of the actual samples."""
        index = self.unit.frame.index
        return {**index, **numbered(self.unit.alias, index)}, numbered(self.unit.golden_of, index)

    @cached_property
    def update(self) -> Projection:
        """The golden update that the unit belongs to."""
        unit = self.unit
        if self.unit.planned:
            return golden_at(unit.golden, unit.actual, unit.place.of_update)
        return golden_update(unit.golden, unit.actual, unit.records[0])

    @cached_property
    def projection(self) -> Projection:
        """The golden update, restricted to the samples with a token here."""
        whole = self.update
        if self.unit.record_type in UPDATE_TYPES or self.unit.planned:
            return whole
        return whole.of_samples(sorted({*numbered(self.unit.golden_of, whole.frame.index).values()}))

    def context(self, source: QuantitySource, placed: Placed) -> FailureContext:
        """Return the failure context of a tensor of tokens."""
        golden, name = self.projection, self.unit.record
        index = numbered(self.unit.golden_of, golden.frame.index)
        layout, rows = header(self.unit.actual, name).layouts(index, golden.frame)
        return golden.context(source, placed.layout, layout, rows, rows_only=placed.by_loss)
