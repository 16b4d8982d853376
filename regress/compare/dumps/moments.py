"""Parameters whose update is decided by rounding: Adam divides a gradient by its own size.

The update of Adam and its relatives is the learning rate times m / sqrt(v). Where m is no larger than its tolerance,
that quotient may be any number between -1 and 1, in two correct runs, too. An example is the bias of the keys in
attention, whose gradient is 0 but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from regress.compare.dumps.findings import weight_beside
from regress.compare.dumps.sides import Side
from regress.dump.arrays import Array
from regress.dump.record import Record

STATE = ("exp_avg", "exp_avg_sq")
"""Moments in the optimizer's record, as torch names them."""


def decided(
    name: str, golden: Array, actual: Array, sides: tuple[Side, Side], records: tuple[str, str], bound: float
) -> Array | None:
    """Take the golden value where rounding decides a parameter; None if nothing tells of such elements.

    Args:
        golden, actual: a parameter after the same update, in one layout.
        records: names of the two records that hold it.
        bound: tolerance of the moments, relative to the largest.
    """
    known = _moments(sides[0], records[0], name, golden.shape)
    other = _moments(sides[1], records[1], name, golden.shape)
    if known is None or other is None:
        return None
    (ours, scale, rate), (theirs, _, _) = known, other
    rate *= 1 + (sides[0].entries[records[0]][1].step or 0)  # the updates that may have added up
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(2.0, bound * scale / np.abs(ours))
    error = np.abs(golden.astype(np.float64) - actual.astype(np.float64))
    settled = (ours != theirs) & (error <= rate * share)
    return np.where(settled, golden, actual) if settled.any() else None


def _moments(side: Side, record: str, name: str, shape: tuple[int, ...]) -> tuple[Array, float, float] | None:
    """Return the first moment of a parameter, the largest of it and its weight's, and the learning rate."""
    _, _, rest = record.partition("/")
    state = f"optimizer/{rest}"
    if state not in side.entries:
        return None
    found: Record = side.read(state)
    rates = found.meta.get("learning_rates")
    rate = rates.get(name) if isinstance(rates, Mapping) else None
    if not isinstance(rate, float) or any(f"{name}/{key}" not in found.tensors for key in STATE):
        return None
    moment = found.tensors[f"{name}/{STATE[0]}"].astype(np.float64)
    if moment.shape != shape:
        return None
    return moment, max(_largest(moment), _beside(found.tensors, name)), rate


def _beside(tensors: Mapping[str, Array], name: str) -> float:
    """Return the largest first moment of the weight beside a bias; 0 for any other parameter."""
    weight = tensors.get(f"{weight_beside(name)}/{STATE[0]}")
    return 0.0 if weight is None else _largest(weight)


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))
