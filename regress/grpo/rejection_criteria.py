"""Criteria of rejection as text: ``seq_mean_k1:0.999:1.001,token_k3:0.1``. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regress.errors import ConfigError
from regress.grpo.objective_catalogue import REJECTIONS


@dataclass(frozen=True)
class Criterion:
    """A divergence of policy and sampler, and the bounds between which a token or sample is kept.

    Attributes:
        level: token, seq_sum, seq_mean or seq_max.
        estimator: k1, k2 or k3 of each token.
        low, high: bounds of the divergence itself; ``low`` is minus infinity except for k1.
    """

    level: str
    estimator: str
    low: float
    high: float


def criteria(text: str) -> tuple[Criterion, ...]:
    """Return the criteria that a text names.

    Bounds of k1 are given as p_sampler / p and kept as their logs; a single one ``u`` means ``1 / u`` to ``u``.

    Raises:
        ConfigError: for an unknown criterion, the same one twice, or bounds that it cannot have.
    """
    found = [_criterion(part.strip(), text) for part in text.split(",")]
    names = [(one.level, one.estimator) for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rejection={text!r} names {'_'.join(name)} twice: give each criterion once.")
    return tuple(found)


def _criterion(part: str, text: str) -> Criterion:
    name, *bounds = part.split(":")
    if name not in REJECTIONS:
        raise ConfigError(
            f"rejection={text!r} names the unknown criterion {name!r}: choose one of {', '.join(REJECTIONS)}."
        )
    level, _, estimator = name.rpartition("_")
    most = 2 if estimator == "k1" else 1
    try:
        values = [float(bound) for bound in bounds]
    except ValueError:
        values = []
    if not 1 <= len(values) <= most or not all(math.isfinite(value) and value > 0 for value in values):
        shape = f"{name}:LOW:HIGH" if most == 2 else f"{name}:HIGH"
        raise ConfigError(f"rejection={text!r}: write {shape} with finite numbers greater than 0.")
    if estimator != "k1":
        return Criterion(level, estimator, -math.inf, values[0])
    low, high = values if len(values) == 2 else (1.0 / values[0], values[0])
    if low > high:
        raise ConfigError(
            f"rejection={text!r}: the low bound {low:g} of {name} exceeds the high bound {high:g}."
        )
    return Criterion(level, estimator, math.log(low), math.log(high))
