"""Losses of microbatches: shares of a sum, which depend on how the batch is split.

Where both sides have the same microbatches each share is compared; otherwise the sums over the fewest microbatches that
hold the same tokens on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, judge_aligned
from regress.compare.alignment.local_shard import Shard
from regress.compare.alignment.shard_overlap import shard_blocks
from regress.compare.alignment.token_overlap import Index
from regress.compare.dumps.canonical_values import golden_update
from regress.compare.dumps.opened_dump import Named, Side, open_side, precisions
from regress.compare.dumps.record_listing import header, record_of
from regress.compare.dumps.sample_matching import numbered
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.metrics.striped_measures import largest
from regress.compare.quantities import SHARES, QuantitySource, source_of
from regress.compare.verdicts.tensor_case import Case
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, dtype_name
from regress.dump.record import Record
from regress.layout import SampleKey, ShardLayout, TokenFrame

QUANTITY, REPORTED = "loss", "metrics"


@dataclass(frozen=True)
class Group:
    """Microbatches of both sides that hold the same tokens.

    Attributes:
        golden, actual: names of their records.
        words: description of the sum, for the reader of a failure.
        samples: actual key -> golden key, where the golden share is the sum of weights times terms of these tokens.
    """

    golden: tuple[str, ...]
    actual: tuple[str, ...]
    place: Place
    words: str
    samples: Mapping[SampleKey, SampleKey] | None = None


@dataclass(frozen=True)
class ShareUnit:
    """The losses of one update.

    Attributes:
        record_type: type of the records.
        terms: golden record -> the one that holds weights and terms of its tokens, where there is one.
        without: tensors that are compared otherwise.
    """

    golden: Named
    actual: Named
    record_type: str
    groups: tuple[Group, ...]
    terms: Mapping[str, str] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)
    without: frozenset[str] = frozenset()

    @property
    def golden_names(self) -> tuple[str, ...]:
        """The golden records that are read."""
        return (*(name for group in self.groups for name in group.golden), *self.terms.values())

    @property
    def actual_names(self) -> tuple[str, ...]:
        """The actual records that are read."""
        return tuple(name for group in self.groups for name in group.actual)


def compare_shares(unit: ShareUnit) -> list[Finding]:
    """Compare the losses of one update."""
    golden_side, actual_side = open_side(unit.golden), open_side(unit.actual)
    scales = _Scales(golden_side, unit.terms)
    found: list[Finding] = []
    for group in unit.groups:
        records = (
            [record_of(golden_side, name) for name in group.golden],
            [record_of(actual_side, name) for name in group.actual],
        )
        sources = [
            source
            for source in _sources(unit, [*records[0], *records[1]])
            if golden_side.writes(unit.record_type, source.tensor)
            and actual_side.writes(unit.record_type, source.tensor)
        ]
        found += [
            _judged(unit, group, source, records, (golden_side, actual_side), scales) for source in sources
        ]
        found += _reported(unit, group, records, (golden_side, actual_side))
    return found


def _reported(
    unit: ShareUnit,
    group: Group,
    records: tuple[Sequence[Record], Sequence[Record]],
    sides: tuple[Side, Side],
) -> Iterator[Finding]:
    """Yield findings on the metrics that a microbatch reports in both dumps beside its loss.

    They are means over tokens and shares of them, of the order of 1, so that is the least scale.
    """
    if len(records[0]) != 1 or len(records[1]) != 1 or group.samples is not None:
        return
    golden, actual = (_metrics(own[0]) for own in records)
    for name in (name for name in golden if name in actual and unit.only.has(REPORTED, name)):
        tolerance = unit.bounds.of(REPORTED, ["float32", *precisions(sides)])
        verdict = judge_tensor(
            np.array(actual[name]),
            np.array(golden[name]),
            tolerance,
            quantity=REPORTED,
            name=name,
            place=group.place,
            scale=max(1.0, abs(golden[name])),
            locate=partial(_named, f"{name} of {group.words}" if group.words else name),
        )
        yield Finding(verdict, tolerance)


def _named(words: str, index: int) -> str:
    return words


def _metrics(record: Record) -> dict[str, float]:
    """Return the finite numbers among the metrics of a loss record."""
    metrics: Any = record.meta.get("metrics")
    rows = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in rows
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _sources(unit: ShareUnit, records: Sequence[Record]) -> Iterator[QuantitySource]:
    for name in dict.fromkeys(name for record in records for name in record.tensors):
        source = source_of(unit.record_type, name)
        if (
            source is not None
            and name not in unit.without
            and source.quantity == QUANTITY
            and unit.only.has(QUANTITY, source.label)
        ):
            yield source


def _judged(
    unit: ShareUnit,
    group: Group,
    source: QuantitySource,
    records: tuple[Sequence[Record], Sequence[Record]],
    sides: tuple[Side, Side],
    scales: _Scales,
) -> Finding:
    golden, actual = (
        [record.tensors[source.tensor] for record in side if source.tensor in record.tensors]
        for side in records
    )
    dtypes = [dtype_name(array.dtype) for array in (*golden, *actual)]
    tolerance = unit.bounds.of(QUANTITY, [*dtypes, *precisions(sides)]).of(source.name)

    def plain(status: Status, detail: str) -> Finding:
        return Finding(Verdict(status, QUANTITY, source.label, group.place, detail), tolerance)

    if group.samples is not None and actual and golden:
        return _summed(unit, group, source, records[1][0], tolerance)
    if len(golden) < len(records[0]) or len(actual) < len(records[1]):
        lacking = "golden dump" if len(golden) < len(records[0]) else "actual dump"
        status = Status.EXTRA if lacking.startswith("golden") else Status.MISSING
        return plain(status, f"the {lacking} has no {source.label} for {group.words}")
    wrong = [
        f"a loss is one number, but those of the {side} dump have the shapes "
        + ", ".join(str(list(array.shape)) for array in arrays)
        for side, arrays in (("golden", golden), ("actual", actual))
        if any(array.size != 1 for array in arrays)
    ]
    if wrong:
        problem = f"{group.place}: {source.label}: {wrong[0]}" if len(wrong) > 1 else ""
        return replace(plain(Status.SHAPE, wrong[0]), problem=problem)
    sums = [_sum(side) for side in (golden, actual)]
    case = Case(QUANTITY, source.label, group.place, tolerance, lambda _: group.words, ())
    share, expected = (Shard(value, ShardLayout.whole(())) for value in (sums[1], sums[0]))
    scale = scales.of(group.golden, source.name, golden)
    pairs = partial(shard_blocks, share, [expected])
    return Finding(
        judge_aligned(case, Aligned(share.array, expected.array, pairs, case.words), scale), tolerance
    )


def _summed(
    unit: ShareUnit, group: Group, source: QuantitySource, record: Record, tolerance: Tolerance
) -> Finding:
    """Compare one share with the sum of golden weights times terms of its tokens."""
    golden = golden_update(unit.golden, unit.actual, group.golden[0])
    actual = record.tensors[source.tensor]
    canonical = _tokens(unit, group, golden.frame)
    expected, scale, words = golden.share(source.name, canonical)
    verdict = judge_tensor(
        actual.reshape(()) if actual.size == 1 else actual,  # a loss of shape [1] is one number, too
        expected,
        tolerance,
        quantity=QUANTITY,
        name=source.label,
        place=group.place,
        scale=scale,
        dtype=unit.bounds.dtype(QUANTITY, source.name),
        locate=words,
    )
    return Finding(verdict, tolerance)


def _tokens(unit: ShareUnit, group: Group, frame: TokenFrame) -> Index:
    """Return the golden tokens of a group's only actual record."""
    (name,) = group.actual
    spans = header(unit.actual, name).spans
    if spans is None:
        return np.zeros(0, np.int64)
    return spans.layout(numbered(group.samples or {}, frame.index), frame).indices(frame.offsets)[0]


def _sum(shares: Sequence[Array]) -> Array:
    """Return a single share as it is, or the exact sum of several."""
    if len(shares) == 1:
        return shares[0].reshape(())
    return np.array(math.fsum(share.item() for share in shares))


@dataclass(frozen=True)
class _Scales:
    """Scales of sums: the sum of the weights, each times the largest term of the update.

    A sum that cancels has no relative accuracy, so its own size is not a scale. Where no weights were recorded it is 1,
    or
    the sum of the shares if that is larger: advantages and ratios are of the order of 1.
    """

    side: Side
    terms: Mapping[str, str]
    _largest: dict[str, float] = field(default_factory=dict)

    def of(self, names: Sequence[str], part: str, shares: Sequence[Array]) -> float:
        known = [self.terms[name] for name in names if name in self.terms]
        quantity = SHARES.get(part, "")
        term = _TERMS.get(quantity, quantity)
        if len(known) < len(names) or not known:
            return max(1.0, math.fsum(abs(share.item()) for share in shares))
        if part not in self._largest:
            records = [record_of(self.side, name) for name in dict.fromkeys(self.terms.values())]
            arrays = [record.tensors[term] for record in records if term in record.tensors]
            self._largest[part] = max((largest(array) for array in arrays), default=0.0)
        weights = [record_of(self.side, name).tensors.get("weights") for name in known]
        total = math.fsum(
            float(np.abs(array, dtype=np.float64).sum()) for array in weights if array is not None
        )
        return total * self._largest[part] or max(1.0, math.fsum(abs(share.item()) for share in shares))


_TERMS = {"token_loss": "elementwise_loss"}
"""Tensors with another name than their quantity."""
