"""Ratios that lie within rounding of the clip range, clipped as the trainer clipped them."""

from __future__ import annotations

import numpy as np

from regress.dump.numpy_arrays import Array

NOTHING = 1e-6
"""Gradient of a clipped token, relative to the largest, where it was recovered by least squares."""
BESIDE = 1e-5
"""Distance of a log-ratio from a bound that it is moved beside: more than float32 rounds log-probs by."""


def ratios_as_clipped(
    now: Array, old: Array, theirs: Array, clip: tuple[float, float], rounding: float
) -> tuple[Array, int]:
    """Move old log-probs so that ratios lie on the side of the clip range where the trainer has them.

    Args:
        now, old: true log-probs ``[K]``, and those in the denominator.
        theirs: the trainer's own log-ratios.
        clip: bounds of the ratio.
        rounding: error of a log-prob; a log-ratio has two of them.

    Returns:
        The denominators, and the number of those that were moved: others differ by more than rounding.
    """
    low, high = (np.log(bound) if bound > 0 else -np.inf for bound in clip)
    true = now - old
    other = ((true > high) != (theirs > high)) | ((true < low) != (theirs < low))
    chosen = other & (np.abs(true - theirs) <= 2 * rounding)
    return np.where(chosen, now - theirs, old), int(chosen.sum())


def taken_branches(ratios: Array, gradient: Array, clip: tuple[float, float], rounded: Array) -> Array:
    """Move recorded log-ratios at a bound of the clip range to the side that the gradients of their tokens prove.

    Log-probs are rounded when they are recorded, and the loss may have had them before that.

    Args:
        ratios, gradient: of each loss token, ``[K]``.
        rounded: error of each log-ratio.
    """
    nothing = np.abs(gradient) <= NOTHING * np.abs(gradient).max(initial=0.0)
    found = ratios.copy()
    for sign, bound in zip((-1, 1), clip, strict=True):
        if bound <= 0:
            continue
        beyond = sign * (ratios - np.log(bound))
        moved = (np.abs(beyond) <= rounded) & ((beyond > 0) != nothing)
        found[moved] = np.log(bound) + sign * np.where(nothing, BESIDE, -BESIDE)[moved]
    return found
