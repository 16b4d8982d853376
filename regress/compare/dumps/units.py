"""Comparison of one record of the actual dump with the golden records of the same tokens or tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from regress.compare.alignment.aligned import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.keys import key_of, norm_of
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.places import Mask, Placed, Places, placed, selected_rows
from regress.compare.alignment.project import Projection
from regress.compare.alignment.shard_overlap import shard_blocks, words_of
from regress.compare.alignment.token_overlap import Index, Part
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.adam import decided
from regress.compare.dumps.bounds import coarsest, widened
from regress.compare.dumps.branches import QUANTITY as JUMPS
from regress.compare.dumps.branches import branched
from regress.compare.dumps.canonical import golden_at, golden_update
from regress.compare.dumps.findings import Defect, Finding
from regress.compare.dumps.golden import text_of
from regress.compare.dumps.held import HeldRecords
from regress.compare.dumps.listing import header, told_by
from regress.compare.dumps.match import numbered
from regress.compare.dumps.optimizer_updates import Updated
from regress.compare.dumps.routes import EXPERTS, Routes, routed
from regress.compare.dumps.routes import QUANTITY as ROUTED
from regress.compare.dumps.sides import Side, open_side, precisions
from regress.compare.dumps.temperatures import judge_temperatures
from regress.compare.dumps.truth import TruthSide
from regress.compare.dumps.unit import Unit
from regress.compare.metrics.stripes import Measures
from regress.compare.quantities import (
    EVERYWHERE,
    METRICS,
    RECOVERABLE,
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    source_or_other,
)
from regress.compare.verdicts.case import Case, Locate, element
from regress.compare.verdicts.tensor import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.dump.arrays import Array, dtype_name, is_float
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, ShardLayout

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
    whole = unit.elementwise or unit.stage in UPDATE_STAGES
    return [*(work.whole() if whole else work.tokens())]


def opened(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> UnitWork:
    """Return a unit with its records, read."""
    golden_side, actual_side = open_side(unit.golden), open_side(unit.actual)
    golden = {name: golden_side.read(name) for name in unit.records}
    return UnitWork(unit, golden_side, actual_side, golden, actual_side.read(unit.record), scales or {})


@dataclass(frozen=True)
class UnitWork:
    """A unit with its records."""

    unit: Unit
    golden_side: Side
    actual_side: Side
    golden: Mapping[str, Record]
    actual: Record
    scales: Mapping[tuple[str, str], float]

    def whole(self) -> Iterator[Finding]:
        """Yield findings on full tensors and shards of them."""
        own, key = [(key_of(record), record) for record in self.golden.values()], key_of(self.actual)
        for source in self._sources():
            known = [local_shard(*one, source.tensor) for one in own if source.tensor in one[1].tensors]
            try:
                actual = local_shard(key, self.actual, source.tensor)
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

    def _whole(self, source: Source, actual: Shard, golden: Sequence[Shard]) -> Aligned:
        """Return a full tensor or a shard of it beside the golden shards."""
        part = actual.layout
        words = words_of(part, partial(element, shape=part.shape, name=source.label))
        pairs = partial(shard_blocks, actual, golden)
        return Aligned(
            actual.array, golden[0].array, pairs, words, lambda: self._golden.context_of_whole(source, part)
        )

    def _settled(self, source: Source, finding: Finding, golden: Sequence[Shard], actual: Shard) -> Finding:
        """Return the finding on a parameter without what the optimizer makes of gradients that are nearly zero."""
        table = "multiple" in finding.tolerance.basis
        if source.quantity != "param" or finding.verdict.status is not Status.DRIFT or not table:
            return finding
        sides = self.golden_side, self.actual_side
        record = next(n for n, found in self.golden.items() if source.tensor in found.tensors)
        names, bound = (record, self.unit.record), finding.verdict.tolerance
        arrays = golden[0].array, actual.array
        relative = {stage: self._tolerance(stage, *arrays).relative for stage in ("gradient", "optimizer")}
        place, name = self.unit.place, source.tensor
        updated = Updated.of(sides, names, place, name, actual, golden, bound, relative)
        closer = updated.explained
        if closer is None and len(golden) == 1 and golden[0].layout == actual.layout:
            closer = decided(name, *arrays, sides, names, relative["optimizer"])
        if closer is None:
            return replace(finding, doubt=updated.doubt)
        found = self._whole(source, replace(actual, array=closer), golden)
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
                hides = source.quantity in EVERYWHERE and self._hidden.size > 0
                yield replace(finding, note=_HIDDEN) if hides and not finding.note else finding
        if self.unit.stage == "token_gradient" and self.unit.only.has("token_gradient", "temperature"):
            about: dict[str, Any] = {"place": self.unit.place, "suffix": self.unit.suffix}
            solved = judge_temperatures(
                self.actual, self.golden.values(), self._tolerance("token_gradient"), **about
            )
            yield from () if solved is None else [Finding(*solved)]

    def _without_rounding(self, source: Source, finding: Finding, found: Aligned) -> Finding:
        """Return the finding without what rounding decides: branches of the loss, and choices of experts."""
        unit, judged = self.unit, partial(self._judged, source)
        if self._held is not None or unit.bounds.given is not None:
            return finding
        if source.quantity == JUMPS:
            return branched(unit, finding, found, self._dtype(found.actual, found.golden), judged)
        if source.quantity == ROUTED and self._routes is not None:
            return routed(self._routes, unit, source.name, finding, found, judged)
        return finding

    @cached_property
    def _routes(self) -> Routes | None:
        """The routers of the update; None where nothing tells their choice."""
        if not any(name.endswith(EXPERTS) for name in self.actual.tensors):
            return None
        unit, dtype = self.unit, self._dtype(*self.actual.tensors.values())
        records = unit.records[0], unit.record
        forced = any(record.meta.get("forced_routing") for record in self.golden.values())
        return Routes.of((unit.golden, unit.actual), records, unit.golden_of, dtype, forced)

    def _dtype(self, *arrays: Array) -> str:
        """Return the coarsest dtype of some arrays and of the models."""
        models = precisions((self.golden_side, self.actual_side))
        return self.unit.bounds.precision or coarsest([*models, *(dtype_name(one.dtype) for one in arrays)])

    def aligned(self) -> Iterator[tuple[Source, Aligned | str]]:
        """Yield tensors of tokens beside their golden counterparts, or the reason why one cannot be placed."""
        ids, loss = self.told()
        actual_loss = loss
        if self._held is None:
            telling = self.unit.actual, self.unit.actual_telling
            actual_loss = told_by(*telling, self._indices[1], self.unit.frame).loss
        locator = Locator(self.unit.frame, ids, text_of(self.golden_side, self.actual_side))
        for source in self._sources():
            if quantity_named(source.quantity).kind is Kind.SHARE:
                continue  # shares belong to microbatches, not to tokens
            golden, by_loss, wrong = self._golden_rows(source, loss)
            found = self._placed(None, source, actual_loss, rows_only=by_loss)
            if isinstance(found, str):
                yield source, found if wrong is None else Defect(wrong)
            elif wrong is not None:
                yield source, wrong
            elif other := next((p for p in golden if p.inner.shape != found.part.inner.shape), None):
                row, its = list(other.inner.shape), list(found.part.inner.shape)
                yield source, f"golden rows of the shape {row}, actual ones of the shape {its}"
            elif golden:
                whole = locator.rows(found.tokens, found.part.inner.shape, found.columns)
                words, around = words_of(found.layout, whole), partial(self._around, source, found)
                mask = source.quantity == "batch_inputs" and source.name.endswith("_mask")
                if mask and self._held is not None:
                    yield source, _everywhere(found, golden[0], words, around)
                else:
                    rows = TokenRows(found.part, golden, self._selected(source, found, loss))
                    yield source, Aligned.of_tokens(rows, words, around)

    def _selected(self, source: Source, found: Placed, loss: Mask | None) -> Index:
        """Return the local rows whose values count: not those that rounding hides on one side."""
        selected = selected_rows(source, found.part.rows, loss)
        hidden = self._hidden if source.stage == "token_gradient" and source.quantity in EVERYWHERE else None
        if hidden is None or not hidden.size:
            return selected
        return selected[~np.isin(found.part.rows[selected], hidden)]

    @cached_property
    def _hidden(self) -> Index:
        """Tokens whose gradient could not be recovered, on either side; their recorded value is 0 whatever it was."""
        if self._held is not None:
            return np.zeros(0, np.int64)  # ranks of our engine have the exact derivatives
        lost = [np.zeros(0, np.int64)]
        for name, record in ((None, self.actual), *self.golden.items()):
            if RECOVERABLE.tensor in record.tensors:
                found = self._placed(name, RECOVERABLE, None)
                if not isinstance(found, str):
                    lost.append(found.part.rows[~found.part.array.reshape(-1).astype(bool)])
        tokens = np.unique(np.concatenate(lost))
        return tokens[tokens >= 0]

    def _golden_rows(self, source: Source, loss: Mask | None) -> tuple[list[Part], bool, str | None]:
        """Return golden values as rows, True if these are those of loss tokens, and why some cannot be placed."""
        if self._held is not None:
            part = self._whole_update.part(source)
            return [part], part.rows.size != self.unit.frame.size, None
        names = [name for name, record in self.golden.items() if source.tensor in record.tensors]
        found = [self._placed(name, source, loss) for name in names]
        known = [one for one in found if not isinstance(one, str)]
        wrong = next((one for one in found if isinstance(one, str)), None)
        return [one.part for one in known], any(one.by_loss for one in known), wrong

    def told(self) -> tuple[Index | None, Mask | None]:
        """Return golden token ids and loss tokens, both ``[frame.size]``, as far as records tell them."""
        if self._held is not None:
            return self._whole_update.locator.token_ids, self._whole_update.known_loss_mask
        return told_by(self.unit.golden, self.unit.telling, self._indices[0], self.unit.frame)[:2]

    def tolerance(self, source: Source, *arrays: Array) -> Tolerance:
        """Return the tolerance of a tensor, widened by the error of estimated values."""
        found = self._tolerance(source.quantity, *arrays).of(source.name)
        if self.unit.bounds.given is not None or not self._estimates:
            return found
        return widened(found, source.tensor, [self.actual.meta], [r.meta for r in self.golden.values()])

    @cached_property
    def _estimates(self) -> bool:
        return any("accuracy" in record.meta for record in (self.actual, *self.golden.values()))

    @cached_property
    def _held(self) -> HeldRecords | None:
        """Records of a plan: golden values tell their loss tokens, and masks count in padding; None for others."""
        return self.actual_side if isinstance(self.actual_side, HeldRecords) else None

    def _placed(
        self, name: str | None, source: Source, loss: Mask | None, *, rows_only: bool = False
    ) -> Placed | str:
        """Return a tensor of a golden record (None: the own one) as rows of tokens, or why it cannot be placed."""
        record = self.actual if name is None else self.golden[name]
        try:
            return placed(record, source, self._places(name), loss, rows_only=rows_only)
        except CompareError as error:
            return str(error)

    def _places(self, name: str | None) -> Places:
        if name not in self._known_places:
            (mine, its), unit = self._indices, self.unit
            if name is not None:
                found = header(unit.golden, name).places(mine, unit.frame)
            elif self._held is not None:
                found = self._held.places(unit.record)
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

    def _sources(self) -> Iterator[Source]:
        chosen = None if self.unit.tensors is None else {*self.unit.tensors}
        for name in self.actual.tensors:
            source = source_or_other(self.unit.stage, name)
            if (chosen is None or name in chosen) and self.unit.only.has(source.quantity, source.label):
                yield source

    def _judged(self, source: Source, found: Aligned, other: Tolerance | None = None) -> Finding:
        tolerance = other or self.tolerance(source, found.actual, found.golden)
        label = source.label + self.unit.suffix
        case = Case(source.quantity, label, self.unit.place, tolerance, found.words, found.actual.shape)
        seen: list[Measures] = []
        dtype = self.unit.bounds.dtype(source.quantity, source.name)
        verdict = judge_aligned(case, found, self._scale(source, label), dtype, seen)
        floats = is_float(found.golden.dtype)
        alike = sum(one.count - one.finite - one.mismatched for one in seen) if floats else 0
        return Finding(verdict, tolerance, nonfinite=alike)

    def _scale(self, source: Source, label: str) -> float | None:
        """Return the largest golden value over all records, as far as it is known."""
        if isinstance(self.golden_side, TruthSide) or source.quantity in METRICS:
            return self._whole_update.scale(source)
        return self.scales.get((source.quantity, label))

    @cached_property
    def _whole_update(self) -> Projection:
        unit = self.unit
        if self._held is not None:
            return golden_at(unit.golden, unit.actual, unit.place.step, unit.place.update)
        return golden_update(unit.golden, unit.actual, unit.records[0])

    @cached_property
    def _golden(self) -> Projection:
        """The golden update, restricted to the samples with a token here."""
        whole = self._whole_update
        if self.unit.stage in UPDATE_STAGES or self._held is not None:
            return whole
        return whole.of_samples(sorted({*numbered(self.unit.golden_of, whole.frame.index).values()}))

    def _around(self, source: Source, placed: Placed) -> FailureContext:
        """Return the failure context of a tensor of tokens."""
        golden, name = self._golden, self.unit.record
        if self._held is not None:
            layout, rows = self._held.layouts(name)
        else:
            index = numbered(self.unit.golden_of, golden.frame.index)
            layout, rows = header(self.unit.actual, name).layouts(index, golden.frame)
        return golden.context(source, placed.layout, layout, rows, rows_only=placed.by_loss)

    def _tolerance(self, quantity: str, *arrays: Array) -> Tolerance:
        key = quantity, *(array.dtype for array in arrays)
        if key not in self._tolerances:
            exact = arrays and not any(is_float(array.dtype) for array in arrays)
            # ids and masks are no less exact for the models' precision
            models = () if exact else precisions((self.golden_side, self.actual_side))
            dtypes = (dtype_name(array.dtype) for array in arrays)
            self._tolerances[key] = self.unit.bounds.of(quantity, [*dtypes, *models])
        return self._tolerances[key]

    @cached_property
    def _tolerances(self) -> dict[tuple[Any, ...], Tolerance]:
        return {}

    def _grad_norm(self) -> Iterator[Finding]:
        actual, *norms = (norm_of(record) for record in (self.actual, *self.golden.values()))
        lacking = actual is None or not norms or any(norm is None for norm in norms)
        if lacking or not self.unit.only.has("grad_norm", "grad_norm"):
            return
        arrays = [next(iter(record.tensors.values()), np.zeros(0)) for record in self.golden.values()]
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

    def _plain(self, status: Status, source: Source, detail: str) -> Finding:
        tolerance = self._tolerance(source.quantity).of(source.name)
        name = source.label + self.unit.suffix
        case = Case(source.quantity, name, self.unit.place, tolerance, None, ())
        return Finding(case.verdict(status, detail=detail), tolerance)


def _everywhere(found: Placed, golden: Part, words: Locate, around: Callable[[], FailureContext]) -> Aligned:
    """Return a mask beside its golden values, which are 0 in padding."""
    values, at = golden.array.reshape(-1), golden.find(found.tokens)
    known = np.where(at >= 0, values[at], values.dtype.type(0)).reshape(found.layout.shape)
    shard = Shard(found.part.array.reshape(found.part.shape), found.layout)
    pairs = partial(shard_blocks, shard, (Shard(known, ShardLayout.whole(known.shape)),))
    return Aligned(shard.array, values, pairs, words, around)
