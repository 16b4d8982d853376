"""New goldens of stored checks: their rows in the update table, and the refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from regress.compare.verdicts.verdict import Verdict
from regress.dump.arrays import is_float
from regress.errors import GoldenError
from regress.golden.checks import StoredCheck
from regress.golden.tree import CONTAINERS, Tree
from regress.plugin.rows import UpdateRow
from regress.plugin.showing import show_briefly


def check_row(
    new: StoredCheck, old: StoredCheck | None, verdicts: Sequence[Verdict], *, pending: bool
) -> UpdateRow:
    """Return the row of a new golden.

    Args:
        verdicts: verdicts on the new value against the old one; empty if there is no old one.
        pending: True if it is to wait for review.
    """
    failed = [verdict for verdict in verdicts if not verdict.ok] or [v for v in verdicts if v.max_error]
    leaves = sum(node[0] not in CONTAINERS for node in new.value.nodes.values())
    row = UpdateRow(new.test, new.name, "new", leaves, leaves, pending=pending)
    if old is None:
        return replace(row, new=show_briefly(new.value))
    if not failed:  # only tolerance, reason, or bits that compare equal
        return replace(row, status="rewritten", changed=0, total=len(verdicts))
    valued = [verdict for verdict in failed if verdict.worst is not None] or failed
    furthest = max(valued, key=lambda verdict: verdict.multiple)
    worst = furthest.worst
    return replace(
        row,
        status=", ".join(dict.fromkeys(str(v.status) if not v.ok else "within tolerance" for v in failed)),
        changed=len(failed),
        total=len(verdicts),
        max_error=max(verdict.max_error for verdict in failed),
        multiple=furthest.multiple,
        old="" if worst is None else f"{worst.golden:.6g}",
        new="" if worst is None else f"{worst.actual:.6g}",
    )


def refuse_nonfinite(value: Tree, name: str) -> None:
    """Raise `GoldenError` naming the first NaN or infinity, which a golden may hold only if asked for."""
    for path, array in value.tensors.items():
        if not is_float(array.dtype):
            continue
        bad = ~np.isfinite(array.astype(np.float64))
        if bad.any():
            index = [int(i) for i in np.unravel_index(int(bad.argmax()), array.shape)]
            raise GoldenError(
                f"the new value of {name!r} is refused: {path} is {float(array[tuple(index)])} at {index} "
                f"({int(bad.sum())} of {array.size} elements are not finite); find what produced it, or pass "
                "nonfinite=True if that is right"
            )


def refuse_unrepeatable(verdicts: Sequence[Verdict], name: str) -> None:
    """Raise `GoldenError` when a second run of the same function returned another value."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if failed:
        first = failed[0]
        raise GoldenError(
            f"the new value of {name!r} is refused: two runs of its function differ ({first.status}, {first.name}, by "
            f"{first.max_error:.3g}); seed what is random in it, or give a tolerance and its reason"
        )
