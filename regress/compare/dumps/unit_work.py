"""A unit with its records, read: its tensors beside their golden values, and their verdicts by a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.shard_overlap import shard_blocks, words_of
from regress.compare.alignment.token_overlap import Index, Part
from regress.compare.alignment.token_places import Mask, Placed, selected_rows
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import text_of
from regress.compare.dumps.opened_dump import precisions
from regress.compare.dumps.scaled_verdicts import Defect, Finding
from regress.compare.dumps.tolerance_bounds import coarsest, widened
from regress.compare.dumps.truth_source import TruthSide
from regress.compare.dumps.unit_records import UnitRecords
from regress.compare.metrics.striped_measures import Measures
from regress.compare.quantities import (
    EVERYWHERE,
    METRICS,
    Kind,
    QuantitySource,
    quantity_named,
    source_or_other,
)
from regress.compare.verdicts.tensor_case import Case, Locate, element
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.layout import ShardLayout


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
        chosen = None if self.unit.tensors is None else {*self.unit.tensors}
        for name in self.records.actual.tensors:
            source = source_or_other(self.unit.record_type, name)
            if (chosen is None or name in chosen) and self.unit.only.has(source.quantity, source.label):
                yield source

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
        """Return the function unless nobody asks what is affected."""
        return around if self.unit.explained else None

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
