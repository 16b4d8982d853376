"""Units of a comparison: one record of the actual dump beside the golden records of the same tokens or tensors.

A unit is small and can be pickled; the process that compares it opens the files by itself. Units do not depend on one
another, so they may be spread over processes and machines in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from regress.compare.alignment.keys import key_of
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.project import Projection
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.bounds import Bounds, widened
from regress.compare.dumps.canonical import golden_update
from regress.compare.dumps.columns import Column
from regress.compare.dumps.failure_context import with_affected
from regress.compare.dumps.findings import Defect, Finding
from regress.compare.dumps.golden import text_of
from regress.compare.dumps.listing import listed
from regress.compare.dumps.moments import decided
from regress.compare.dumps.optimizer_updates import Updated
from regress.compare.dumps.padding import Aligned, judge_padding
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.shard_overlap import Shard, shard_blocks
from regress.compare.dumps.sides import Side, open_side
from regress.compare.dumps.token_overlap import Index, Part, blocks
from regress.compare.dumps.tokens import Mask, selected_rows, token_words, tokens_of, told_tokens
from regress.compare.metrics.stripes import Measures
from regress.compare.quantities import (
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    source_or_other,
)
from regress.compare.verdicts.case import Case, Locate, element
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.values import Blocks, judge_blocks
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name, is_float
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import Range, SampleKey, ShardLayout, TokenFrame, TokenLayout


@dataclass(frozen=True)
class Unit:
    """One actual record and its golden counterparts.

    Attributes:
        golden, actual: the two dumps.
        record: name of the actual record; ``records`` names of the golden ones that hold the same, the likeliest first.
        place: place of the verdicts.
        stage: type of the records.
        frame: the golden samples that have a token here; empty for full tensors.
        golden_of: actual or golden key -> key in the frame.
        telling, actual_telling: records of each side that tell loss tokens and token ids of these samples.
        bounds, only: tolerances, and which tensors are compared.
        suffix: end of a verdict's name, such as ``(golden rank 1)``.
        tensors: those that are compared; by default all.
        elementwise: True if they are compared element by element, because nothing tells their tokens.
    """

    golden: str
    actual: str
    record: str
    records: tuple[str, ...]
    place: Place
    stage: str
    frame: TokenFrame = field(default_factory=lambda: TokenFrame((), ()))
    golden_of: Mapping[SampleKey, SampleKey] = field(default_factory=dict)
    alias: Mapping[SampleKey, SampleKey] = field(default_factory=dict)
    telling: tuple[str, ...] = ()
    actual_telling: tuple[str, ...] = ()
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)
    suffix: str = ""
    tensors: tuple[str, ...] | None = None
    elementwise: bool = False

    @property
    def golden_names(self) -> tuple[str, ...]:
        """The golden records that are read."""
        return (*self.records, *self.telling)

    @property
    def actual_names(self) -> tuple[str, ...]:
        """The actual records that are read."""
        return (self.record, *self.actual_telling)


def compare_unit(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> list[Finding]:
    """Compare one record.

    Args:
        scales: ``(quantity, name)`` -> largest golden value anywhere; by default that of the values at hand.

    Raises:
        DumpError: if a file cannot be read.
    """
    work = _opened(unit, scales)
    whole = unit.elementwise or unit.stage in UPDATE_STAGES
    return [*(work.whole() if whole else work.tokens())]


def aligned(unit: Unit) -> dict[str, Aligned | str]:
    """Return the tensors of tokens of one record, by name; a sentence for one that cannot be placed."""
    return {source.tensor: found for source, found in _opened(unit, None).aligned()}


def columns(unit: Unit) -> tuple[Index | None, Mask | None, list[Column]]:
    """Return the columns of a record: golden token ids, loss tokens, and quantities with a value a token."""
    work = _opened(unit, None)
    found = [
        Column.of(source.quantity, one, work.tolerance(source, one.part.array, one.parts[0].array))
        for source, one in work.aligned()
        if not isinstance(one, str)
        and quantity_named(source.quantity).kind is Kind.TOKEN
        and one.part.width == 1
    ]
    return *work.told(), found


def _opened(unit: Unit, scales: Mapping[tuple[str, str], float] | None) -> _Work:
    golden_side, actual_side = open_side(unit.golden), open_side(unit.actual)
    golden = {name: golden_side.read(name) for name in unit.records}
    return _Work(unit, golden_side, actual_side, golden, actual_side.read(unit.record), scales or {})


@dataclass(frozen=True)
class _Work:
    unit: Unit
    golden_side: Side
    actual_side: Side
    golden: Mapping[str, Record]
    actual: Record
    scales: Mapping[tuple[str, str], float]

    def whole(self) -> Iterator[Finding]:
        """Yield findings on full tensors and shards of them."""
        for source in self._sources():
            array = self.actual.tensors[source.tensor]
            layout = local_shard(key_of(self.actual), self.actual, source.tensor).layout
            known = [
                (record.tensors[source.tensor], local_shard(key_of(record), record, source.tensor).layout)
                for record in self.golden.values()
                if source.tensor in record.tensors
            ]
            shards = [Shard(found, at) for found, at in known if at.shape == layout.shape]
            if shards:
                actual, golden = Shard(array, layout), shards[0].array
                words = _elements(layout, source.label)
                case = self._case(source, words, array.shape, array, golden)
                pairs = partial(shard_blocks, actual, shards)
                around = partial(self._around_whole, source, layout)
                finding = self._judged(case, pairs, array, golden, around)
                yield self._settled(source, case, finding, shards, actual, around)
            elif known:
                detail = f"golden {list(known[0][1].shape)}, actual {list(layout.shape)}"
                yield self._plain(Status.SHAPE, source, detail)
        yield from self._grad_norm()

    def _settled(
        self,
        source: Source,
        case: Case,
        finding: Finding,
        golden: Sequence[Shard],
        actual: Shard,
        around: Callable[[], FailureContext],
    ) -> Finding:
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
        pairs = partial(shard_blocks, Shard(closer, actual.layout), golden)
        return replace(self._judged(case, pairs, closer, golden[0].array, around), note=updated.note)

    def tokens(self) -> Iterator[Finding]:
        """Yield findings on tensors of tokens."""
        for source, found in self.aligned():
            if isinstance(found, Defect):
                yield replace(self._plain(Status.SHAPE, source, found), problem=f"{self.unit.place}: {found}")
            elif isinstance(found, str):
                yield self._plain(Status.SHAPE, source, found)
            else:
                part, golden = found.part, found.parts[0].array
                case = self._case(source, found.words, part.shape, part.array, golden)
                pairs = partial(blocks, part, found.parts, found.selected)
                finding = self._judged(case, pairs, part.array.reshape(part.shape), golden, found.around)
                if finding.verdict.ok and found.padding:
                    finding = replace(finding, verdict=judge_padding(finding.verdict, case, found))
                yield finding

    def aligned(self) -> Iterator[tuple[Source, Aligned | str]]:
        """Yield tensors of tokens beside their golden counterparts, or the reason why one cannot be placed."""
        frame, (golden_index, actual_index) = self.unit.frame, self._indices()
        ids, loss = self.told()
        _, actual_loss = told_tokens(self.actual_side, self.unit.actual_telling, actual_index, frame)
        locator = Locator(frame, ids, text_of(self.golden_side, self.actual_side))
        for source in self._sources():
            if quantity_named(source.quantity).kind is Kind.SHARE:
                continue  # shares belong to microbatches, not to tokens
            records = [record for record in self.golden.values() if source.tensor in record.tensors]
            found = _placed(self.actual, source, actual_index, frame, actual_loss)
            placed = [_placed(record, source, golden_index, frame, loss) for record in records]
            parts = [one[0] for one in placed if not isinstance(one, str)]
            wrong = next((one for one in placed if isinstance(one, str)), None)
            if isinstance(found, str):
                yield source, found if wrong is None else Defect(wrong)
            elif wrong is not None:
                yield source, wrong
            elif parts:
                part, lead = found
                selected = selected_rows(source, part, loss)
                around = partial(self._around, source)
                yield source, Aligned(part, parts, selected, token_words(locator, part), lead > 1, around)

    def told(self) -> tuple[Index | None, Mask | None]:
        """Return golden token ids and loss tokens, both ``[frame.size]``, as far as records tell them."""
        return told_tokens(self.golden_side, self.unit.telling, self._indices()[0], self.unit.frame)

    def tolerance(self, source: Source, *arrays: Array) -> Tolerance:
        """Return the tolerance of a tensor, widened by the error of estimated values."""
        found = self._tolerance(source.quantity, *arrays).of(source.name)
        if self.unit.bounds.given is not None:
            return found
        return widened(found, source.tensor, [self.actual.meta], [r.meta for r in self.golden.values()])

    def _indices(self) -> tuple[dict[SampleKey, int], dict[SampleKey, int]]:
        """Return the frame numbers of the golden and of the actual samples."""
        index = {key: number for number, key in enumerate(self.unit.frame.samples)}
        golden_index = {**index, **{key: index[to] for key, to in self.unit.alias.items() if to in index}}
        return golden_index, {key: index[to] for key, to in self.unit.golden_of.items() if to in index}

    def _sources(self) -> Iterator[Source]:
        chosen = self.unit.tensors
        for name in self.actual.tensors:
            source = source_or_other(self.unit.stage, name)
            if (chosen is None or name in chosen) and self.unit.only.has(source.quantity, source.label):
                yield source

    def _case(self, source: Source, words: Locate, shape: tuple[int, ...], *arrays: Array) -> Case:
        label = source.label + self.unit.suffix
        return Case(source.quantity, label, self.unit.place, self.tolerance(source, *arrays), words, shape)

    def _judged(
        self, case: Case, pairs: Blocks, actual: Array, golden: Array, around: Callable[[], FailureContext]
    ) -> Finding:
        scale, bitwise = self.scales.get((case.quantity, case.name)), case.tolerance.bitwise
        seen: list[Measures] = []
        verdict = judge_blocks(case, pairs, actual, golden, scale, seen)
        alike = sum(one.count - one.finite - one.mismatched for one in seen) if is_float(golden.dtype) else 0
        affected = with_affected(verdict, pairs, actual, golden, around, bitwise=bitwise)
        return Finding(affected, case.tolerance, nonfinite=alike)

    @cached_property
    def _golden(self) -> Projection:
        """The golden update, restricted to the samples with a token here."""
        whole = golden_update(self.unit.golden, self.unit.actual, self.unit.records[0])
        if self.unit.stage in UPDATE_STAGES:
            return whole
        samples = {whole.index[to] for to in self.unit.golden_of.values() if to in whole.index}
        return whole.of_samples(sorted(samples))

    @cached_property
    def _layouts(self) -> tuple[TokenLayout, TokenLayout]:
        """Layouts of the golden update's tokens in the actual record and in its rows of loss tokens."""
        header, frame = listed(self.unit.record, self.actual), self._golden.frame
        assert header.spans is not None
        assert header.rows is not None
        number = self._golden.index
        index = {key: number[to] for key, to in self.unit.golden_of.items() if to in number}
        return header.spans.layout(index, frame), header.rows.layout(index, frame)

    def _around(self, source: Source) -> FailureContext:
        """Return the failure context of a tensor of tokens."""
        part = local_shard(key_of(self.actual), self.actual, source.tensor).layout
        layout, rows = self._layouts
        grid, shape = layout.shape, part.shape
        rows_only = isinstance(self.actual.meta.get(source.tensor), str)
        if not rows_only and shape[:2] == grid:
            found = self._golden.around.tokens(source, layout, grid)
        elif not rows_only and shape[:1] == (grid[0] * grid[1],):
            found = self._golden.around.tokens(source, layout, shape[:1])
        else:
            loss = self._golden.known_loss_mask
            canonical, _ = rows.indices(self._golden.frame.offsets)
            tokens = canonical if loss is None else canonical[loss[canonical]]
            if tokens.size != math.prod(shape[:-1]):
                return FailureContext()
            found = self._golden.around.rows(source, rows, tokens, shape)
        return found if part.is_whole else found.part(part)

    def _around_whole(self, source: Source, part: ShardLayout) -> FailureContext:
        """Return the failure context of a full tensor, or a shard of it."""
        found = self._golden.around.whole(source.quantity, source.name)
        return found if part.is_whole else found.part(part)

    def _tolerance(self, quantity: str, *arrays: Array) -> Tolerance:
        models = [
            side.precision for side in (self.golden_side, self.actual_side) if side.precision is not None
        ]
        if arrays and not any(is_float(array.dtype) for array in arrays):
            models = []  # ids and masks are no less exact for the model's precision
        return self.unit.bounds.of(quantity, [*(dtype_name(array.dtype) for array in arrays), *models])

    def _grad_norm(self) -> Iterator[Finding]:
        norms = [record.meta.get("grad_norm") for record in (self.actual, *self.golden.values())]
        told = [float(norm) for norm in norms if isinstance(norm, int | float)]
        if len(told) < len(norms) or not self.unit.only.has("grad_norm", "grad_norm"):
            return
        arrays = [next(iter(record.tensors.values()), np.zeros(0)) for record in self.golden.values()]
        tolerance = self._tolerance("grad_norm", *arrays[:1])
        case = Case(
            "grad_norm", f"grad_norm{self.unit.suffix}", self.unit.place, tolerance, lambda _: "grad_norm", ()
        )
        actual, golden = (Shard(np.array(value), ShardLayout.whole(())) for value in told[:2])
        found = partial(shard_blocks, actual, [golden])
        yield Finding(judge_blocks(case, found, actual.array, golden.array, None), tolerance)

    def _plain(self, status: Status, source: Source, detail: str) -> Finding:
        tolerance = self._tolerance(source.quantity)
        place = self.unit.place
        return Finding(
            Verdict(status, source.quantity, source.label + self.unit.suffix, place, detail), tolerance
        )


def _placed(
    record: Record, source: Source, index: Mapping[SampleKey, int], frame: TokenFrame, loss: Mask | None
) -> tuple[Part, int] | str:
    """Return a tensor indexed by its tokens, or the reason why it cannot be placed."""
    try:
        return tokens_of(record, source, index, frame, loss)
    except CompareError as error:
        return str(error)


def _elements(layout: ShardLayout, name: str) -> Locate:
    def words(index: int) -> str:
        local = np.unravel_index(index, layout.local_shape)
        place = [_index(ranges, int(i)) for ranges, i in zip(layout.ranges, local, strict=True)]
        return element(int(np.ravel_multi_index(place, layout.shape)) if place else 0, layout.shape, name)

    return words


def _index(ranges: Iterable[Range], local: int) -> int:
    """Return the index in the whole dimension of a local index."""
    for start, stop in ranges:
        if local < stop - start:
            return start + local
        local -= stop - start
    raise IndexError(f"{local} lies beyond what is held of the dimension")
