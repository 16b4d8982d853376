"""Comparison of one record of the actual dump with the golden records of the same tokens or tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.record_keys import key_of, norm_of
from regress.compare.alignment.shard_overlap import shard_blocks, words_of
from regress.compare.alignment.token_overlap import Index, Part
from regress.compare.alignment.token_places import Mask, Placed, selected_rows
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.adamw_rounding import Updated
from regress.compare.dumps.clip_boundary import QUANTITY as JUMPS
from regress.compare.dumps.clip_boundary import branched
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import text_of
from regress.compare.dumps.moe_routing import EXPERTS, Routes, routed
from regress.compare.dumps.moe_routing import QUANTITY as ROUTED
from regress.compare.dumps.opened_dump import precisions
from regress.compare.dumps.scaled_verdicts import Defect, Finding
from regress.compare.dumps.temperature_verdict import judge_temperatures
from regress.compare.dumps.tolerance_bounds import coarsest, widened
from regress.compare.dumps.truth_source import TruthSide
from regress.compare.dumps.unit_records import UnitRecords
from regress.compare.metrics.striped_measures import Measures
from regress.compare.quantities import (
    EVERYWHERE,
    METRICS,
    UPDATE_TYPES,
    Kind,
    QuantitySource,
    quantity_named,
    source_or_other,
)
from regress.compare.verdicts.tensor_case import Case, Locate, element
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.errors import CompareError
from regress.layout import ShardLayout

_HIDDEN = (
    "derivatives by log-probs and entropies that rounding hides (where token_gradient tells recoverable as 0, as where "
    "the probability of a token is next to 1) were not compared"
)


def compare_unit(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> list[Finding]:
    """Compare one record.

    Args:
        scales: ``(quantity, name)`` -> largest golden value anywhere; by default that of the values at hand.

    Raises:
        DumpError: if a file cannot be read.
    """
    work = opened(unit, scales)
    whole = unit.elementwise or unit.record_type in UPDATE_TYPES
    return [*(work.whole() if whole else work.tokens())]


def opened(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> UnitWork:
    """Return a unit with its records, read."""
    return UnitWork(unit, UnitRecords.of(unit), scales or {})


@dataclass(frozen=True)
class UnitWork:
    """A unit with its records."""

    unit: Unit
    records: UnitRecords
    scales: Mapping[tuple[str, str], float]

    def whole(self) -> Iterator[Finding]:
        """Yield findings on full tensors and shards of them."""
        own = [(key_of(record), record) for record in self.records.golden.values()]
        key = key_of(self.records.actual)
        for source in self._sources():
            known = [local_shard(*one, source.tensor) for one in own if source.tensor in one[1].tensors]
            try:
                actual = local_shard(key, self.records.actual, source.tensor)
            except CompareError as error:
                yield self._plain(Status.COVERAGE, source, str(error))
                continue
            shards = [shard for shard in known if shard.layout.shape == actual.layout.shape]
            if shards:
                finding = self._judged(source, self._whole(source, actual, shards))
                yield self._settled(source, finding, shards, actual)
            elif known:
                part = "" if actual.layout.is_whole else "a part of "
                detail = f"golden {list(known[0].layout.shape)}, actual {part}{list(actual.layout.shape)}"
                yield self._plain(Status.SHAPE, source, detail)
        yield from self._grad_norm()

    def _whole(self, source: QuantitySource, actual: Shard, golden: Sequence[Shard]) -> Aligned:
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

    def _settled(
        self, source: QuantitySource, finding: Finding, golden: Sequence[Shard], actual: Shard
    ) -> Finding:
        """Return the finding on a parameter without what the optimizer makes of gradients that are nearly zero."""
        table = "multiple" in finding.tolerance.basis
        if source.quantity != "param" or finding.verdict.status is not Status.DRIFT or not table:
            return finding
        sides = self.records.golden_side, self.records.actual_side
        record = next(n for n, found in self.records.golden.items() if source.tensor in found.tensors)
        names, bound = (record, self.unit.record), finding.verdict.tolerance
        arrays = golden[0].array, actual.array
        relative = {
            record_type: self._tolerance(record_type, *arrays).relative
            for record_type in ("gradient", "optimizer")
        }
        place, name = self.unit.place, source.tensor
        updated = Updated.of(sides, names, place, name, actual, golden, bound, relative)
        if updated.explained is None:
            return replace(finding, inconclusive=updated.inconclusive)
        found = self._whole(source, replace(actual, array=updated.explained), golden)
        return replace(self._judged(source, found), note=updated.note)

    def tokens(self) -> Iterator[Finding]:
        """Yield findings on tensors of tokens."""
        for source, found in self.aligned():
            if isinstance(found, Defect):
                yield replace(self._plain(Status.SHAPE, source, found), problem=f"{self.unit.place}: {found}")
            elif isinstance(found, str):
                yield self._plain(Status.SHAPE, source, found)
            else:
                finding = self._judged(source, found)
                finding = self._without_rounding(source, finding, found)
                hides = source.quantity in EVERYWHERE and self.records.hidden.size > 0
                yield replace(finding, note=_HIDDEN) if hides and not finding.note else finding
        if self.unit.record_type == "token_gradient" and self.unit.only.has("token_gradient", "temperature"):
            about: dict[str, Any] = {"place": self.unit.place, "suffix": self.unit.suffix}
            solved = judge_temperatures(
                self.records.actual, self.records.golden.values(), self._tolerance("token_gradient"), **about
            )
            yield from () if solved is None else [Finding(*solved)]

    def _without_rounding(self, source: QuantitySource, finding: Finding, found: Aligned) -> Finding:
        """Return the finding without what rounding decides: branches of the loss, and choices of experts."""
        unit, judged = self.unit, partial(self._judged, source)
        if unit.planned or unit.bounds.given is not None:
            return finding
        if source.quantity == JUMPS:
            return branched(unit, finding, found, self._dtype(found.actual, found.golden), judged)
        if source.quantity == ROUTED and self._routes is not None:
            return routed(self._routes, unit, source.name, finding, found, judged)
        return finding

    @cached_property
    def _routes(self) -> Routes | None:
        """The routers of the update; None where nothing tells their choice."""
        if not any(name.endswith(EXPERTS) for name in self.records.actual.tensors):
            return None
        unit, dtype = self.unit, self._dtype(*self.records.actual.tensors.values())
        records = unit.records[0], unit.record
        forced = any(record.meta.get("forced_routing") for record in self.records.golden.values())
        return Routes.of((unit.golden, unit.actual), records, unit.golden_of, dtype, forced)

    def _dtype(self, *arrays: Array) -> str:
        """Return the coarsest dtype of some arrays and of the models."""
        models = precisions((self.records.golden_side, self.records.actual_side))
        return self.unit.bounds.precision or coarsest([*models, *(dtype_name(one.dtype) for one in arrays)])

    def aligned(self) -> Iterator[tuple[QuantitySource, Aligned | str]]:
        """Yield tensors of tokens beside their golden counterparts, or the reason why one cannot be placed."""
        ids, loss = self.records.golden_tokens()
        actual_loss = self.records.actual_loss(loss)
        locator = Locator(self.unit.frame, ids, text_of(self.records.golden_side, self.records.actual_side))
        for source in self._sources():
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
        found = self._tolerance(source.quantity, *arrays).of(source.name)
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

    def _sources(self) -> Iterator[QuantitySource]:
        chosen = None if self.unit.tensors is None else {*self.unit.tensors}
        for name in self.records.actual.tensors:
            source = source_or_other(self.unit.record_type, name)
            if (chosen is None or name in chosen) and self.unit.only.has(source.quantity, source.label):
                yield source

    def _judged(self, source: QuantitySource, found: Aligned, other: Tolerance | None = None) -> Finding:
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

    def _tolerance(self, quantity: str, *arrays: Array) -> Tolerance:
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

    def _grad_norm(self) -> Iterator[Finding]:
        actual, *norms = (norm_of(record) for record in (self.records.actual, *self.records.golden.values()))
        lacking = actual is None or not norms or any(norm is None for norm in norms)
        if lacking or not self.unit.only.has("grad_norm", "grad_norm"):
            return
        arrays = [next(iter(record.tensors.values()), np.zeros(0)) for record in self.records.golden.values()]
        tolerance = self._tolerance("grad_norm", *arrays[:1])
        verdict = judge_tensor(
            actual,
            norms[0],
            tolerance,
            quantity="grad_norm",
            name=f"grad_norm{self.unit.suffix}",
            place=self.unit.place,
            locate=lambda _: "grad_norm",
        )
        yield Finding(verdict, tolerance)

    def _plain(self, status: Status, source: QuantitySource, detail: str) -> Finding:
        tolerance = self._tolerance(source.quantity).of(source.name)
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
