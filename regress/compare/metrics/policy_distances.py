"""Distances between two policies, seen from log-probs of the same tokens.

The golden log-probs belong to the policy that the tokens are assumed to be drawn from. For each token, ``r`` is its
probability under the actual policy over that under the golden one. The means of ``k1 = -log r``, ``k2 = (log r)**2 /
2`` and ``k3 = r - 1 - log r`` estimate the divergence KL(golden, actual): ``k1`` and ``k3`` without bias, ``k2`` and
``k3`` with less variance and never below 0.

Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html, 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.chunked_measures import chunks
from regress.dump.numpy_arrays import Array

CLIP = 0.2
"""Distance from 1 beyond which the usual objective clips a ratio."""
QUANTITIES = frozenset({"log_probs", "old_log_probs", "ref_log_probs"})
"""Quantities that are log-probs of tokens."""


@dataclass(frozen=True)
class LogRatios:
    """Sums over tokens whose log-probs are finite on both sides; by default those of ``count`` equal log-probs.

    Attributes:
        total, square: sums of ``log r`` and of its square; ``above`` of ``r - 1``, and ``excess`` of ``r - 1 - log r``.
        highest: the largest ``r - 1``.
        beyond: ratios further from 1 than `CLIP`.
    """

    count: int = 0
    total: float = 0.0
    square: float = 0.0
    above: float = 0.0
    excess: float = 0.0
    highest: float = 0.0
    beyond: int = 0

    def then(self, other: LogRatios) -> LogRatios:
        """Return the sums over these tokens and further ones."""
        if not self.count or not other.count:
            return self if self.count else other
        return LogRatios(
            self.count + other.count,
            self.total + other.total,
            self.square + other.square,
            self.above + other.above,
            self.excess + other.excess,
            max(self.highest, other.highest),
            self.beyond + other.beyond,
        )

    def distances(self) -> dict[str, float] | None:
        """Return ``k1``, ``k2``, ``k3``, ``max_ratio``, ``mean_ratio`` and ``clipped`` (ratios beyond `CLIP`).

        Return None if there is no token.
        """
        if not self.count:
            return None
        return {
            "k1": 0.0 - self.total / self.count,
            "k2": self.square / self.count / 2,
            "k3": self.excess / self.count,
            "max_ratio": self.highest + 1,
            "mean_ratio": self.above / self.count + 1,
            "clipped": self.beyond / self.count,
        }


def log_ratios(actual: Array, golden: Array) -> LogRatios:
    """Return the sums over log-probs of one shape, at loss tokens only."""
    found = LogRatios()
    with np.errstate(all="ignore"):  # a ratio may overflow, and infinities of both sides are taken out
        for a, g in chunks(None, actual.reshape(-1), golden.reshape(-1)):
            found = found.then(_sums(a.astype(np.float64) - g.astype(np.float64)))
    return found


def _sums(log_ratio: NDArray[np.float64]) -> LogRatios:
    total = float(np.add.reduce(log_ratio))
    if not math.isfinite(total):
        log_ratio = log_ratio[np.isfinite(log_ratio)]
        total = float(np.add.reduce(log_ratio))
    if not log_ratio.size:
        return LogRatios()
    above = np.expm1(log_ratio)  # r - 1, exact where r is nearly 1
    return LogRatios(
        log_ratio.size,
        total,
        float(np.dot(log_ratio, log_ratio)),
        float(np.add.reduce(above)),
        float(np.add.reduce(above - log_ratio)),
        float(np.maximum.reduce(above)),
        int(np.count_nonzero(np.abs(above) > CLIP)),
    )
