"""Vocabulary of difficulty: the names of levels, and the scale of complexity.

A level is a number from 1 up; the first five have names. Complexity is a number from 0 to 10 that belongs to the
problem itself: the same prompt has the same complexity at whatever level it was drawn. For the built-in tasks
`regress.tasks.difficulty_levels` defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from regress.errors import TaskError

LEVELS = ("basic", "intermediate", "advanced", "expert", "master")
"""Names of the levels 1 to 5."""

HIGHEST = 10.0
"""Complexity of the hardest problems; the easiest have 0."""


def level_number(level: object, stated: str) -> int:
    """Return the number of a level that is given by name, in any case, or by number.

    Args:
        stated: where the level was given, for the error.

    Raises:
        TaskError: if it is neither one of `LEVELS` nor a whole number from 1 up.
    """
    if isinstance(level, str):
        name = level.strip().lower()
        if name in LEVELS:
            return LEVELS.index(name) + 1
        if name.isascii() and name.isdigit():
            level = int(name)
    if isinstance(level, bool) or not isinstance(level, int) or level < 1:
        raise TaskError(
            f"{stated}: {level!r} is not a level; give one of {', '.join(LEVELS)}, or a whole number from 1 up"
        )
    return level


def level_name(level: int) -> str:
    """Return the name of a level; those beyond the fifth are named by their number."""
    return LEVELS[level - 1] if level <= len(LEVELS) else f"level_{level}"


def complexity_number(value: object, stated: str) -> float:
    """Return a complexity that was given with a problem.

    Raises:
        TaskError: if it is not a number from 0 to 10.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= HIGHEST:
        raise TaskError(f"{stated}: {value!r} is not a complexity; give a number from 0 to {HIGHEST:.0f}")
    return float(value)


def on_scale(size: float, bounds: Sequence[float]) -> float:
    """Return the complexity of a problem of this size, by linear interpolation between the sizes of a task's levels.

    Args:
        bounds: size of the smallest problem of the first level, and of the largest problem of each level, not
            descending. They have the complexities 0, 10/n, 20/n, ..., 10 for n levels, equal ones the highest of
            theirs; sizes beyond count as the nearest of them.
    """
    step = HIGHEST / (len(bounds) - 1)
    known = {bound: step * index for index, bound in enumerate(bounds)}
    if size <= bounds[0]:
        return known[bounds[0]]
    for low, high in pairwise(known):
        if size <= high:
            return known[low] + (known[high] - known[low]) * (size - low) / (high - low)
    return HIGHEST


def in_range(value: float, bounds: tuple[float, float]) -> bool:
    """Return True if a complexity lies within a range, both ends included."""
    return bounds[0] <= value <= bounds[1]
