"""Scales of metrics: the size of the numbers that a metric is made of, which bounds its rounding.

The mean of numbers that cancel, such as the loss of a group whose advantages add up to 0, has no relative accuracy, so
its own size is not a scale; nor is that of the least of them, such as a ratio that is computed as a change of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.striped_measures import largest
from regress.dump.numpy_arrays import Array

Truth = Mapping[str, Mapping[str, Array]]
ShareScale = Callable[[str], float]
"""Scale of a sum over the loss tokens of an update, by its name in `regress.compare.quantities.SHARES`."""

_SHARES: Mapping[str, str] = {
    "training_step/loss": "loss",
    "training_epoch/loss_*": "loss",
    "training_step/dr_component_policy": "pg_loss",
}
"""Sums over the loss tokens, weights included."""

_MEANS: Mapping[str, str] = {
    "training_step/policy_loss": "policy_loss",
    "training_step/kl": "kl",
    "training_epoch/kl_*": "kl",
    "training_step/ratio/*": "ratio",
    "rollouts/advantages_*": "advantages",
}
"""Means, deviations and extremes of the values of a quantity, one a loss token."""

_LOG_RATIOS = "training_step/approx_kl/*"
_FRACTIONS = ("training_step/clip_ratio/*", "training_step/kept", "rollouts/truncated_ratio")
"""Means of numbers that are 0 or 1."""

_LEAST = 2.0**-10
"""Share of advantage times log-prob below which the size of policy losses is not a scale.

Losses that hold the log-prob itself, such as VESPO's, are as far off as log-probs are, however small they come out
where the policy is certain of its tokens. At the bound of float64, 1e-12, this allows for 4 spacings of log-probs.
"""


def size_of(quantity: str, values: Array, truth: Truth) -> float:
    """Return the size of the largest golden value of a quantity, of policy losses at least that of their rounding."""
    own = largest(values)
    if quantity != "policy_loss":
        return own
    made = [truth.get(name, {}).values() for name in ("advantages", "log_probs")]
    return max(own, _LEAST * math.prod(max(map(largest, found), default=0.0) for found in made))


def metric_scale(name: str, value: Array, truth: Truth, share_scale: ShareScale) -> float:
    """Return the scale of a metric's tolerance, at least its own size.

    Args:
        truth: canonical golden values of the update, quantity -> name -> values; a metric of quantities that are not
            there has its own size.
    """
    own = largest(value)
    if any(fnmatchcase(name, pattern) for pattern in _FRACTIONS):
        return max(own, 1.0)
    if share := _of(_SHARES, name):
        return max(own, share_scale(share))
    if quantity := _of(_MEANS, name):
        sizes = (size_of(quantity, values, truth) for values in truth.get(quantity, {}).values())
        return max(own, *sizes, 0.0)
    if fnmatchcase(name, _LOG_RATIOS):
        return max(own, _log_ratios(truth))
    return own


def _of(table: Mapping[str, str], name: str) -> str | None:
    return next((found for pattern, found in table.items() if fnmatchcase(name, pattern)), None)


def _log_ratios(truth: Truth) -> float:
    """Return the largest logarithm of a token's importance ratio."""
    ratios = next(iter(truth.get("ratio", {}).values()), None)
    if ratios is None:
        return 0.0
    wide: NDArray[np.float64] = ratios.astype(np.float64)
    return largest(np.log(wide[wide > 0]))
