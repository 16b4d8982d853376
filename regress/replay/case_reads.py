"""Rollouts and golden values of a case, read and verified once for all replays that a process judges."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.golden.golden_case import GoldenCase

LIMIT = 1 << 26
"""Most bytes of golden values of a case that are kept; those of a larger one are read each time."""

Truth = dict[str, dict[str, Array]]

_ROLLOUTS: WeakKeyDictionary[GoldenCase, dict[int, list[Trajectory]]] = WeakKeyDictionary()
_TRUTHS: WeakKeyDictionary[GoldenCase, dict[str, Truth]] = WeakKeyDictionary()


def trajectories_of(case: GoldenCase) -> dict[int, list[Trajectory]]:
    """Return the recorded rollouts of every step; nobody changes them."""
    if case not in _ROLLOUTS:
        _ROLLOUTS[case] = case.trajectories()
    return _ROLLOUTS[case]


def truth_of(case: GoldenCase) -> Callable[[str], Truth]:
    """Return the function of an update's name that returns its golden values; those that are kept are read-only."""
    if _size(case) > LIMIT:
        return case.truth
    kept = _TRUTHS.setdefault(case, {})

    def of(where: str) -> Truth:
        if where not in kept:
            kept[where] = case.truth(where)
            for array in (array for tensors in kept[where].values() for array in tensors.values()):
                array.flags.writeable = False
        return kept[where]

    return of


def _size(case: GoldenCase) -> int:
    """Return the number of bytes of all golden values of a case."""
    recorded = {} if case.manifest is None else case.manifest.truth
    return sum(entry.stamp.size for row in recorded.values() for entry in row.values())
