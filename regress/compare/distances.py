"""How far two policies are apart, seen from log-probs of the same tokens.

The golden log-probs are of the policy that the tokens are taken to be drawn from. Of a token, ``r`` is the probability
under the actual policy over that under the golden one. The means of ``k1 = -log r``, ``k2 = (log r)**2 / 2`` and
``k3 = r - 1 - log r`` estimate the divergence KL(golden, actual): ``k1`` and ``k3`` without bias, ``k2`` and ``k3``
with less variance and never below 0.

Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html, 2020.
"""

from __future__ import annotations

import numpy as np

from regress.dump.arrays import Array, is_float

CLIP = 0.2
"""A ratio further from 1 is one that the usual objective clips."""
QUANTITIES = frozenset({"log_probs", "old_log_probs", "ref_log_probs"})
"""Quantities that are log-probs of tokens."""


def policy_distances(actual: Array, golden: Array, clip: float = CLIP) -> dict[str, float] | None:
    """``k1``, ``k2``, ``k3``, ``max_ratio``, ``mean_ratio`` and ``clipped``, the share of ratios beyond ``1 +- clip``.

    Of pairs that are finite on both sides; None where there is none.

    Args:
        actual, golden: log-probs of one shape, at loss tokens only.
    """
    if not is_float(actual.dtype) or not is_float(golden.dtype):
        return None
    with np.errstate(all="ignore"):  # a ratio may overflow, and infinities of both sides are taken out
        log_ratio = actual.astype(np.float64).reshape(-1) - golden.astype(np.float64).reshape(-1)
        log_ratio = log_ratio[np.isfinite(log_ratio)]
        if not log_ratio.size:
            return None
        above = np.expm1(log_ratio)  # r - 1, exact where r is nearly 1
        return {
            "k1": float(-log_ratio.mean()),
            "k2": float((log_ratio * log_ratio).mean() / 2),
            "k3": float((above - log_ratio).mean()),
            "max_ratio": float(above.max() + 1),
            "mean_ratio": float(above.mean() + 1),
            "clipped": float((np.abs(above) > clip).mean()),
        }
