"""Invariants of metrics: those of an update are the parts of its microbatches put together, and a part is that of the
token values beside it. They hold in every precision, and without golden values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from regress.compare.metrics.ulps import spacing
from regress.compare.updates.invariant_counts import Checked
from regress.dump.numpy_arrays import Array, is_float
from regress.dump.record import Record

PREFIX = "training_step/"
PARTS = "metric_parts"
"""Key of the metadata of a loss record: metric -> ``[total, count, kind]`` over the microbatch's loss tokens."""

TOKENS: Mapping[str, tuple[str, str]] = {
    "policy_loss": ("is_loss_debug", "policy_loss"),
    "kl": ("is_loss_debug", "kl"),
    "sampler_weight": ("is_loss_debug", "sampler_weights"),
    "entropy": ("forward_data", "entropy"),
    "ratio/mean": ("is_loss_debug", "prob_ratio"),
    "ratio/min": ("is_loss_debug", "prob_ratio"),
    "ratio/max": ("is_loss_debug", "prob_ratio"),
}
"""Metric -> record type and tensor of the values, one a loss token, that it is the mean or extreme of."""

_SPACINGS = 64
"""Spacings of the coarsest dtype at the size of what a metric is made of: its sum may be taken in any order.

Measured: sums in the dtype of their values, and extremes of 1 + expm1(x) in place of exp(x), reach 1.5.
"""


@dataclass(frozen=True)
class MetricPart:
    """A microbatch's part of a metric: sum of the values or their extreme, and their number."""

    total: float
    count: int
    kind: Literal["mean", "min", "max"]

    @property
    def value(self) -> float:
        """Mean or extreme."""
        return self.total / self.count if self.kind == "mean" else self.total


def parts_of(record: Record) -> dict[str, MetricPart]:
    """Return the parts that a loss record tells, by metric; rows of another form are left out."""
    rows: Any = record.meta.get(PARTS)
    found = {}
    for name, row in rows.items() if isinstance(rows, Mapping) else ():
        if isinstance(row, list) and len(row) == 3 and row[2] in ("mean", "min", "max"):
            total, count, kind = row
            if _number(total) and type(count) is int and count >= 0:
                found[str(name)] = MetricPart(float(total), count, kind)
    return found


def joined(parts: Iterable[MetricPart]) -> tuple[MetricPart, float] | None:
    """Return several parts as one, and the size of the sums that it was made of; None if nothing was counted."""
    kept = [part for part in parts if part.count]
    if not kept or len({part.kind for part in kept}) > 1:
        return None
    kind, totals = kept[0].kind, [part.total for part in kept]
    total = math.fsum(totals) if kind == "mean" else min(totals) if kind == "min" else max(totals)
    return MetricPart(total, sum(part.count for part in kept), kind), math.fsum(map(abs, totals))


def check_combined(known: Checked, losses: Iterable[Record], reports: Mapping[str, Record]) -> None:
    """Check the metrics that ranks report of an update against the parts of all microbatches.

    Args:
        losses: a loss record of each microbatch, one of ranks that repeat each other's tokens.
        reports: the metrics of each rank, by its words.
    """
    records = [*losses]
    parts = [parts_of(record) for record in records]
    if not records or not all(PARTS in record.meta for record in records):
        return
    names = dict.fromkeys(name for one in parts for name in one)
    expected = {name: joined(one[name] for one in parts if name in one) for name in names}
    of_loss = [share for record in records if (share := record.tensors.get("loss")) is not None]
    shares = [float(share.reshape(-1)[0]) for share in of_loss]
    for words, record in reports.items():
        for name, whole in expected.items():
            actual = record.tensors.get(PREFIX + name)
            if whole is None or actual is None or actual.size != 1:
                continue
            part, size = whole
            scale = size / part.count if part.kind == "mean" else max(1.0, abs(part.value))
            bound = _rounding(actual, *of_loss) * scale
            known.number(part.value, float(actual.reshape(-1)[0]), bound, f"{PREFIX}{name} {words}")
        actual = record.tensors.get(f"{PREFIX}loss")
        if actual is not None and actual.size == 1 and len(shares) == len(records):
            bound = _rounding(actual, *of_loss) * math.fsum(map(abs, shares))
            known.number(math.fsum(shares), float(actual.reshape(-1)[0]), bound, f"{PREFIX}loss {words}")


def check_part(known: Checked, name: str, part: MetricPart, values: Array, words: str) -> None:
    """Check a microbatch's part of a metric against the values of its loss tokens."""
    if part.count != values.size or not values.size:
        return
    wide = values.astype(np.float64)
    if part.kind == "mean":
        bound = _rounding(values) * math.fsum(np.abs(wide).tolist())
        known.number(math.fsum(wide.tolist()), part.total, bound, f"the sum of {name} {words}")
    else:
        extreme = float(wide.min() if part.kind == "min" else wide.max())
        known.number(extreme, part.total, _rounding(values) * max(1.0, abs(extreme)), f"{name} {words}")


def _rounding(*arrays: Array) -> float:
    """Return the error that rounding may leave of numbers of size 1, in the coarsest dtype of some arrays."""
    return _SPACINGS * max(spacing(array.dtype) for array in arrays if is_float(array.dtype))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
