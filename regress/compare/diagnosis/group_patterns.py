"""Patterns of advantages, group by group: another scale, or another baseline.

Within a group all samples share mean and deviation. So a factor of its own for each group leaves the baseline right,
and a number of its own that is added to each group leaves the scale right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.failure_pattern import Pattern
from regress.compare.diagnosis.hypotheses import Floats
from regress.compare.verdicts.affected_elements import Affected

KEY, WITHIN, BY_TOKEN, ZEROS = "groups", "within", "by token", "zeros"
_SAME = 1e-6
_LITTLE = 0.01
"""Largest change of a factor that an epsilon or the precision of a deviation explains."""


def of_groups(actual: Floats, golden: Floats, groups: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Return whether values are the golden ones times, or plus, a number of each group; empty if neither.

    A group without two different golden values, or with none that moved, proves neither; one without any value but 0
    keeps it under every factor.

    Args:
        actual, golden: ``[K]`` values of the tokens that count; ``groups``: ``[K]`` their groups.
    """
    if not actual.size or not np.isfinite(actual).all() or not np.isfinite(golden).all():
        return {}
    slack = _SAME * max(float(np.abs(golden).max()), float(np.abs(actual).max()))
    scale, offset, proofs, most = True, True, 0, 0.0
    for group in np.unique(groups):
        own, right = actual[groups == group], golden[groups == group]
        square = float(right @ right)
        factor = float(own @ right) / square if square > slack**2 else 0.0
        fits = bool((np.abs(own - factor * right) <= slack).all())
        offset &= float(np.ptp(own - right)) <= slack
        moved = bool((np.abs(own - right) > slack).any())
        if float(np.ptp(right)) <= slack:
            scale &= fits
            continue
        proofs += moved
        most = max(most, abs(factor - 1.0))
        scale &= fits and factor > 0.0  # as every deviation is
    return (
        {KEY: {"scale": scale, "offset": offset, "proofs": proofs, "most": most}} if scale or offset else {}
    )


def of_tokens(actual: Floats, golden: Floats, samples: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Return a pattern where values, golden ones or actual ones alone, differ within samples; empty if none does.

    Args:
        actual, golden: ``[K]`` values of the tokens that count; ``samples``: ``[K]`` their samples.
    """
    if not actual.size or not np.isfinite(actual).all():
        return {}
    slack = _SAME * max(float(np.abs(golden).max()), float(np.abs(actual).max()))
    parts = [samples == sample for sample in np.unique(samples)]
    if any(float(np.ptp(golden[own])) > slack for own in parts):
        return {BY_TOKEN: {}}
    return {WITHIN: {}} if any(float(np.ptp(actual[own])) > slack for own in parts) else {}


def of_zeros(golden: Floats, over: NDArray[np.bool_]) -> dict[str, dict[str, Any]]:
    """Return a pattern where values are wrong that must be 0, and no others; empty if that is not so.

    Args:
        golden: ``[K]`` values of the tokens that count; ``over``: ``[K]`` where the actual ones are wrong.
    """
    return {ZEROS: {}} if over.any() and not golden[over].any() and golden.any() else {}


def group_patterns(found: Sequence[Affected]) -> Iterator[Pattern]:
    """Yield what all failing advantages have in common, group by group."""
    if any(WITHIN in item.held for item in found):
        yield Pattern("advantages:within", "different values within a sample, which has one")
        return
    if any(BY_TOKEN in item.held for item in found):
        yield Pattern("advantages:by_token", "golden ones differ from token to token of a sample")
    if found and all(ZEROS in item.held for item in found):
        yield Pattern("advantages:zeros", "only where the golden ones are 0")
    patterns: list[Mapping[str, Any]] = [item.held.get(KEY, {}) for item in found]
    if not any(numbers.get("proofs") for numbers in patterns):
        return
    if all(numbers.get("scale") for numbers in patterns):
        if max(numbers["most"] for numbers in patterns) > _LITTLE:
            yield Pattern("advantages:scale", "each group multiplied by a number of its own")
    elif all(numbers.get("offset") for numbers in patterns):
        yield Pattern("advantages:baseline", "a number of its own added to each group")
