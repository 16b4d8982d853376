"""Self-test of the judge: golden values rolled by one place must leave their tolerance.

A tolerance under which a shuffled tensor passes proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from regress.compare.metrics.striped_measures import largest
from regress.compare.quantities import Kind, quantity_named
from regress.compare.updates.invariant_counts import QUANTITY
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array

NAME = "rolled"
_REASON = "what is rolled by one place must fail, or the comparison could not"


def judge_rolled(
    truths: Sequence[Mapping[str, Mapping[str, Array]]],
    tolerances: Callable[[str], Tolerance | None],
    place: Place,
) -> Verdict:
    """Return one verdict for the golden values of all updates: some tensor of every quantity must fail when rolled.

    Quantities whose tensors hold one value each (sums and numbers) cannot be rolled, and are left out.

    Args:
        place: place of the verdict: the first of the updates.
    """
    noticed, blind = 0, []
    for quantity in dict.fromkeys(quantity for truth in truths for quantity in truth):
        tolerance = tolerances(quantity)
        if tolerance is None or quantity_named(quantity).kind in (Kind.SHARE, Kind.SCALAR):
            continue
        moved = [_moved(values) for truth in truths for values in truth.get(quantity, {}).values()]
        shares = [share for share in moved if share is not None]
        if shares and max(shares) <= tolerance.relative:
            blind.append(
                f"{quantity} ({max(shares):.3g} of the scale, tolerated are {tolerance.relative:.3g})"
            )
        noticed += len(shares)
    if not blind:
        return Verdict(Status.OK, QUANTITY, NAME, place, count=noticed, reason=_REASON)
    detail = f"values that are rolled by one place pass: {', '.join(blind)}; measure the tolerance again"
    return Verdict.fault(Status.DRIFT, QUANTITY, NAME, place, detail, len(blind), count=noticed)


def _moved(values: Array) -> float | None:
    """Return how far a tensor moves when rolled, as a fraction of its largest value; None for one that cannot move."""
    wide = values.astype(np.float64).reshape(-1)
    if wide.size < 2 or not np.isfinite(wide).all() or not np.any(wide != wide[0]):
        return None
    return float(np.abs(np.roll(wide, 1) - wide).max()) / largest(values)
