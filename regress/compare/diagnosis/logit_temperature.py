"""The temperature under which logits explain log-probs or entropies."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats


def log_sum_exp(logits: Floats) -> Floats:
    """Return the log of the sum of exponentials, ``[...]``, of logits ``[..., V]``."""
    top = logits.max(axis=-1)
    return np.asarray(top + np.log(np.exp(logits - top[..., None]).sum(axis=-1)))


def temperature(
    actual: Floats, logits: Floats, targets: NDArray[np.int64], *, entropy: bool = False
) -> tuple[float, float]:
    """Find the temperature under which logits give these log-probs (or entropies), and the largest error left.

    Args:
        actual: ``[K]``; ``logits``: ``[K, V]``; ``targets``: ``[K]`` the token of each row.
    """

    def values(t: float) -> Floats:
        scaled = logits / t
        normal = scaled - log_sum_exp(scaled)[:, None]
        if entropy:
            return np.asarray(-(np.exp(normal) * normal).sum(axis=1))
        return np.asarray(normal[np.arange(len(targets)), targets])

    def badness(log_t: float) -> float:
        return float(((values(math.exp(log_t)) - actual) ** 2).sum())

    grid = np.linspace(math.log(0.05), math.log(20.0), 121)
    best = int(np.argmin([badness(x) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        first, second = high - golden * (high - low), low + golden * (high - low)
        if badness(first) < badness(second):
            high = second
        else:
            low = first
    t = math.exp((low + high) / 2)
    near = float(f"{t:.6g}")  # a configured number is short
    t = min((near, t), key=lambda x: float(np.abs(values(x) - actual).max(initial=0.0)))
    return t, float(np.abs(values(t) - actual).max(initial=0.0))
