"""The unit of a comparison: one record of the actual dump beside the golden records of the same tokens or tensors.

A unit is small and can be pickled; whoever compares it opens the files by itself. Units do not depend on one another,
so they may be spread over processes and machines in any way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from regress.compare.alignment.locate import Locator
from regress.compare.dumps.bounds import Bounds
from regress.compare.dumps.boxes import Shard, shard_blocks
from regress.compare.dumps.listing import Spans, listed
from regress.compare.dumps.pieces import BLOCK, Index, Part, blocks, token_part
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.sides import Side, open_side
from regress.compare.metrics.stripes import nonfinite
from regress.compare.quantities import (
    MASKS,
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    source_of,
)
from regress.compare.verdicts.block import Block
from regress.compare.verdicts.case import Case, Locate, element, kind
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.values import judge_blocks
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name, is_float
from regress.dump.mapped import release
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import Range, SampleKey, ShardLayout, TokenFrame

U = TypeVar("U")


@dataclass(frozen=True)
class Unit:
    """What one record is compared with.

    Attributes:
        golden, actual: the two dumps.
        record: name of the actual record; ``records`` names of the golden ones that hold the same, the likeliest first.
        place: of the verdicts.
        stage: type of the records.
        frame: the golden samples that have a token here; empty for full tensors.
        golden_of: actual or golden key -> key in the frame.
        telling, actual_telling: records of each side that tell loss tokens and token ids of these samples.
        bounds, only: tolerances, and which tensors are compared.
        suffix: what a verdict's name ends with, such as ``(golden rank 1)``.
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

    @property
    def golden_names(self) -> tuple[str, ...]:
        """The golden records that are read."""
        return (*self.records, *self.telling)

    @property
    def actual_names(self) -> tuple[str, ...]:
        """The actual records that are read."""
        return (self.record, *self.actual_telling)


@dataclass(frozen=True)
class Finding:
    """A verdict and the tolerance behind it, whose scale may turn out to be larger over all units."""

    verdict: Verdict
    tolerance: Tolerance


def compare_unit(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> list[Finding]:
    """Compare one record.

    Args:
        scales: ``(quantity, name)`` -> largest golden value anywhere; by default that of the values at hand.

    Raises:
        DumpError: if a file cannot be read.
    """
    work = _opened(unit, scales)
    return [*(work.whole() if unit.stage in UPDATE_STAGES else work.tokens())]


@dataclass(frozen=True, eq=False)
class Aligned:
    """A tensor of tokens and what it is compared with.

    Attributes:
        part: the actual tensor; ``parts`` the golden ones; ``selected`` its rows that count.
        words: canonical coordinates of an element.
        padding: whether it has rows that hold no token.
    """

    part: Part
    parts: Sequence[Part]
    selected: Index
    words: Locate
    padding: bool

    def values(self) -> tuple[Array, Array]:
        """The golden and the actual values that count, token beside token."""
        found = [*blocks(self.part, self.parts, self.selected)]
        golden = [block.golden for block in found] or [self.parts[0].array.reshape(-1)[:0]]
        actual = [block.actual for block in found] or [self.part.array.reshape(-1)[:0]]
        return np.concatenate(golden), np.concatenate(actual)


def aligned(unit: Unit) -> dict[str, Aligned | str]:
    """The tensors of tokens of one record, by name; a sentence for one that cannot be placed."""
    return {source.tensor: found for source, found in _opened(unit, None).aligned()}


def _opened(unit: Unit, scales: Mapping[tuple[str, str], float] | None) -> _Work:
    ours, theirs = open_side(unit.golden), open_side(unit.actual)
    golden = {name: ours.read(name) for name in unit.records}
    return _Work(unit, ours, theirs, golden, theirs.read(unit.record), scales or {})


@dataclass(frozen=True)
class _Work:
    unit: Unit
    ours: Side
    theirs: Side
    golden: Mapping[str, Record]
    actual: Record
    scales: Mapping[tuple[str, str], float]

    def whole(self) -> Iterator[Finding]:
        """Full tensors and shards of them."""
        for source in self._sources():
            array = self.actual.tensors[source.tensor]
            layout = _shard(self.actual, source.tensor)
            shards = []
            for record in self.golden.values():
                if source.tensor in record.tensors:
                    known = _shard(record, source.tensor)
                    if known.shape != layout.shape:
                        detail = f"golden {list(known.shape)}, actual {list(layout.shape)}"
                        yield self._plain(Status.SHAPE, source, detail)
                        break
                    shards.append(Shard(record.tensors[source.tensor], known))
            else:
                if shards:
                    actual, golden = Shard(array, layout), shards[0].array
                    words = _elements(layout, source.label)
                    case = self._case(source, words, array.shape, array, golden)
                    yield self._judged(case, partial(shard_blocks, actual, shards), array, golden)
        yield from self._grad_norm()

    def tokens(self) -> Iterator[Finding]:
        """Tensors of tokens."""
        for source, found in self.aligned():
            if isinstance(found, str):
                yield self._plain(Status.SHAPE, source, found)
            else:
                part, golden = found.part, found.parts[0].array
                case = self._case(source, found.words, part.shape, part.array, golden)
                pairs = partial(blocks, part, found.parts, found.selected)
                finding = self._judged(case, pairs, part.array, golden)
                if finding.verdict.ok and found.padding:
                    finding = replace(finding, verdict=_junk(finding.verdict, case, found))
                yield finding

    def aligned(self) -> Iterator[tuple[Source, Aligned | str]]:
        """Tensors of tokens beside what they are compared with, or why one cannot be placed."""
        frame = self.unit.frame
        index = {key: number for number, key in enumerate(frame.samples)}
        ours = {**index, **{key: index[to] for key, to in self.unit.alias.items() if to in index}}
        theirs = {key: index[to] for key, to in self.unit.golden_of.items() if to in index}
        ids, loss = _told(self.ours, self.unit.telling, ours, frame)
        _, actual_loss = _told(self.theirs, self.unit.actual_telling, theirs, frame)
        locator = Locator(frame, ids)
        for source in self._sources():
            if quantity_named(source.quantity).kind is Kind.SHARE:
                continue  # shares belong to microbatches, not to tokens
            try:
                part, lead = _tokens_of(self.actual, source, theirs, frame, actual_loss)
                parts = [
                    _tokens_of(record, source, ours, frame, loss)[0]
                    for record in self.golden.values()
                    if source.tensor in record.tensors
                ]
            except CompareError as error:
                yield source, str(error)
                continue
            if parts:
                selected = _selected(source, part, loss)
                yield source, Aligned(part, parts, selected, _words(locator, part), lead > 1)

    def _sources(self) -> Iterator[Source]:
        for name in self.actual.tensors:
            source = source_of(self.unit.stage, name)
            if source is not None and self.unit.only.has(source.quantity, source.label):
                yield source

    def _case(self, source: Source, words: Locate, shape: tuple[int, ...], *arrays: Array) -> Case:
        tolerance = self._tolerance(source.quantity, *arrays).of(source.name)
        label = source.label + self.unit.suffix
        return Case(source.quantity, label, self.unit.place, tolerance, words, shape)

    def _judged(
        self, case: Case, pairs: Callable[[], Iterable[Block]], actual: Array, golden: Array
    ) -> Finding:
        scale = self.scales.get((case.quantity, case.name))
        return Finding(judge_blocks(case, pairs, actual, golden, scale), case.tolerance)

    def _tolerance(self, quantity: str, *arrays: Array) -> Tolerance:
        models = [side.precision for side in (self.ours, self.theirs) if side.precision is not None]
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


def _shard(record: Record, name: str) -> ShardLayout:
    """Which part of a tensor a record holds."""
    shards: Any = record.meta.get("shards") or {}
    if name not in shards:
        return ShardLayout.whole(record.tensors[name].shape)
    try:
        layout = ShardLayout.from_json(shards[name])
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(
            f"{name} of {record.type} on rank {record.rank} has no usable shard layout ({error}); record it again"
        ) from None
    if layout.local_shape != record.tensors[name].shape:
        raise CompareError(
            f"{name} of {record.type} on rank {record.rank} has the shape {list(record.tensors[name].shape)}, but its "
            f"shard layout is that of a part of the shape {list(layout.local_shape)}"
        )
    return layout


def _elements(layout: ShardLayout, name: str) -> Locate:
    def words(index: int) -> str:
        local = np.unravel_index(index, layout.local_shape)
        place = [_index(ranges, int(i)) for ranges, i in zip(layout.ranges, local, strict=True)]
        return element(int(np.ravel_multi_index(place, layout.shape)) if place else 0, layout.shape, name)

    return words


def _index(ranges: Iterable[Range], local: int) -> int:
    """Where a local index lies in the whole dimension."""
    for start, stop in ranges:
        if local < stop - start:
            return start + local
        local -= stop - start
    raise IndexError(f"{local} lies beyond what is held of the dimension")


def _told(
    side: Side, names: Iterable[str], index: Mapping[SampleKey, int], frame: TokenFrame
) -> tuple[Index | None, np.ndarray[Any, np.dtype[np.bool_]] | None]:
    """``[frame.size]`` token ids and loss tokens, as far as records tell them."""
    ids = np.zeros(frame.size, np.int64)
    loss, told = np.zeros(frame.size, bool), np.zeros(frame.size, bool)
    known = False
    for name in names:
        record = side.read(name)
        header = listed(name, record)
        if header.spans is None:
            continue
        canonical = header.spans.canonical(index, frame.offsets)
        here = np.flatnonzero(canonical >= 0)
        tokens = canonical[here]
        values = record.tensors.get("input_ids")
        if values is not None and values.size == canonical.size:
            ids[tokens] = values.reshape(-1)[here]
            known = True
        mask = record.tensors.get(MASKS.get(record.type, ""))
        if mask is not None and mask.size == canonical.size:
            new = ~told[tokens]
            loss[tokens[new]] = mask.reshape(-1)[here[new]].astype(bool)
            told[tokens] = True
    return (ids if known else None), (loss if told.any() else None)


def _tokens_of(
    record: Record,
    source: Source,
    index: Mapping[SampleKey, int],
    frame: TokenFrame,
    loss: np.ndarray[Any, np.dtype[np.bool_]] | None,
) -> tuple[Part, int]:
    """A tensor by its tokens, and how many of its dimensions are places."""
    header = listed(source.tensor, record)
    if header.spans is None or header.rows is None:
        raise CompareError(header.problem)
    array, layout = record.tensors[source.tensor], _shard(record, source.tensor)
    canonical = header.spans.canonical(index, frame.offsets)
    shape, grid = layout.shape, header.spans.shape
    rows_only = isinstance(record.meta.get(source.tensor), str)  # "rows of the loss tokens, in order"
    if not rows_only and shape[:2] == grid:
        return token_part(array, layout, canonical, 2), 2
    if not rows_only and shape[:1] == canonical.shape:
        return token_part(array, layout, canonical, 1), 1
    tokens = header.rows.canonical(index, frame.offsets)
    if loss is not None and len(shape) > 1:
        order = _in_segments(header.rows, tokens)
        kept = order[loss[order]]
        if shape[:-1] in ((1, kept.size), (kept.size,)):
            return token_part(array, layout, kept, len(shape) - 1), len(shape) - 1
    raise CompareError(
        f"{source.tensor} has the shape {list(shape)}, which is neither that of its tokens {list(grid)} nor one row "
        "for each loss token"
    )


def _in_segments(spans: Spans, canonical: Index) -> Index:
    """The tokens in the order of the segments, which rows of loss tokens follow."""
    columns = spans.shape[1]
    runs = [
        canonical[row * columns + col : row * columns + col + stop - start]
        for _, start, stop, row, col in spans.segments
    ]
    found = np.concatenate([np.zeros(0, np.int64), *runs])
    return found[found >= 0]


def _selected(source: Source, part: Part, loss: np.ndarray[Any, np.dtype[np.bool_]] | None) -> Index:
    """The local rows whose values count."""
    here = part.rows >= 0
    if quantity_named(source.quantity).kind is Kind.TOKEN and loss is not None:
        here &= loss[np.maximum(part.rows, 0)]
    return np.flatnonzero(here)


def _words(locator: Locator, part: Part) -> Locate:
    width = max(part.width, 1)

    def words(index: int) -> str:
        row, within = divmod(index, width)
        token = int(part.rows[row])
        if token < 0:
            return f"place {row} (padding)"
        where = locator.token(token)
        if part.inner.shape in ((), (1,)):
            return where
        local = np.unravel_index(within, part.inner.local_shape)
        place = [int(known[i]) for known, i in zip(part.inner.along(), local, strict=True)]
        return f"{where}, element {place}"

    return words


def _junk(verdict: Verdict, case: Case, found: Aligned) -> Verdict:
    """Values that are not finite where no loss token lies, and where the golden side has none."""
    part = found.part
    if not is_float(part.array.dtype) or not part.array.size:
        return verdict
    outside = np.ones(part.rows.size, bool)
    outside[found.selected] = False
    width, tolerated = max(part.width, 1), _Tolerated(found.parts)
    for row, inner in _nonfinite_rows(part.array.reshape(part.rows.size, width), np.flatnonzero(outside)):
        if not tolerated.at(int(part.rows[row])):
            column = int(np.flatnonzero(nonfinite(inner))[0])
            value = float(inner[column])
            detail = f"{kind(value)} where no loss token lies, and nothing of the kind in the golden dump"
            return case.uncompared(verdict, row * width + column, value, detail)
    return verdict


@dataclass(frozen=True)
class _Tolerated:
    """Where golden records hold values that are not finite, too."""

    parts: Sequence[Part]

    def at(self, token: int) -> bool:
        """Whether they do at a token, or, for padding, in theirs."""
        if token < 0:
            return self._padding
        found = ((part, int(part.find(np.array([token]))[0])) for part in self.parts)
        return any(bool(nonfinite(part.array[at]).any()) for part, at in found if at >= 0)

    @cached_property
    def _padding(self) -> bool:
        return any(
            True
            for part in self.parts
            if part.array.size
            for _ in _nonfinite_rows(
                part.array.reshape(part.rows.size, max(part.width, 1)), np.flatnonzero(part.rows < 0)
            )
        )


def _nonfinite_rows(array: Array, rows: Index) -> Iterator[tuple[int, Array]]:
    """Those of some rows that hold a value that is not finite."""
    step = max(BLOCK // array.shape[1], 1)
    for start in range(0, rows.size, step):
        here = rows[start : start + step]
        values = array[here]
        for at in np.flatnonzero(nonfinite(values).any(axis=1)).tolist():
            yield int(here[at]), values[at]
        release(array[here[0] : here[-1] + 1])


def settle(
    results: Sequence[tuple[U, Sequence[Finding]]],
) -> tuple[list[Verdict], list[tuple[U, dict[tuple[str, str], float]]]]:
    """Verdicts under the scale of a tensor over all units, and the units that have to be compared anew under it.

    The tolerance of a tensor is relative to its largest golden value over all ranks and microbatches. A unit judges by
    the largest that it sees, which is stricter: what passes there passes, what fails there may not.
    """
    scales: dict[tuple[Any, ...], float] = {}
    for _, findings in results:
        for finding in findings:
            scales[_tensor(finding.verdict)] = max(
                scales.get(_tensor(finding.verdict), 0.0), finding.verdict.scale
            )
    verdicts: list[Verdict] = []
    again = []
    for unit, findings in results:
        larger = {
            (f.verdict.quantity, f.verdict.name): scales[_tensor(f.verdict)]
            for f in findings
            if f.verdict.status is Status.DRIFT and f.verdict.scale < scales[_tensor(f.verdict)]
        }
        if larger:
            again.append((unit, larger))
        verdicts += [
            _rescaled(f, scales[_tensor(f.verdict)])
            for f in findings
            if (f.verdict.quantity, f.verdict.name) not in larger
        ]
    return verdicts, again


def _tensor(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.place.step, verdict.place.update, verdict.quantity, verdict.name


def _rescaled(finding: Finding, scale: float) -> Verdict:
    verdict, tolerance = finding.verdict, finding.tolerance
    if verdict.status is not Status.OK or not verdict.count or scale == verdict.scale or tolerance.bitwise:
        return verdict
    bound = tolerance.relative * scale + tolerance.absolute
    multiple = verdict.max_error / bound if bound else 0.0
    relative = verdict.max_error / scale if scale else 0.0
    return replace(verdict, scale=scale, tolerance=bound, multiple=multiple, relative=relative)
