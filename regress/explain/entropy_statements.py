"""Statements read from derivatives by the entropy: presence of a bonus, its coefficient and its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.explain.aggregation_weights import AggregationRule
from regress.explain.loss_statements import either
from regress.explain.loss_tokens import Mask
from regress.explain.statement import Statement
from regress.explain.update_tokens import Bools, Floats

FLAT = 1e-3
"""Relative spread up to which the derivatives of a weight rule count as those of one coefficient."""
ABSENT = 1e-3
"""Derivative by the entropy, relative to the largest by a log-prob, up to which its absence counts as shown."""


def entropies(mask: Mask, rules: list[AggregationRule]) -> Iterator[Statement]:
    """Yield statements on the entropy bonus; none where its derivatives are too noisy to tell."""
    if "token_gradient/entropy_gradient" not in mask.update.values or not mask.policy.any():
        return
    tokens = mask.known & (mask.update.block >= 0)
    largest = float(np.abs(mask.g[mask.policy]).max())
    live = tokens & mask.entropy
    if not live.any():
        hidden = float(np.median(mask.rounding[tokens & mask.policy]))
        if hidden <= ABSENT * largest:
            found = float(np.abs(mask.h[tokens]).max(initial=0.0))
            evidence: dict[str, Any] = {"largest derivative": found, "by log-prob": largest}
            yield Statement("entropy", "no entropy has a gradient", ("none",), evidence)
        return
    yield from _bonus(mask, rules, live)
    if mask.expected is None or not (live & ~mask.expected).any():
        return
    count = int((live & ~mask.expected).sum())
    text = f"{count} tokens outside of {mask.source} have an entropy bonus"
    evidence = {"tokens": count, "inside": int((live & mask.expected).sum())}
    yield Statement("entropy", text, ("masked tokens",), evidence, departure=True)


def _bonus(mask: Mask, rules: list[AggregationRule], live: Bools) -> Iterator[Statement]:
    """Yield the coefficient under every rule of weights that the derivatives follow."""
    fits: dict[str, float] = {}
    names: list[str] = []
    for rule in rules:
        weights = rule.values[live]
        if rule.length == "free" or not np.isfinite(weights).all():
            continue
        coefficients: Floats = -mask.h[live] / weights
        middle = float(np.median(coefficients))
        if middle != 0 and _spread(mask, coefficients, middle) <= FLAT:
            fits.setdefault(f"{middle:.5g} x {rule.words}", middle)
            names.append(f"{rule.name}: {middle:.5g}")
    if not fits:
        return
    text = f"a bonus of {either(list(fits))}"
    evidence = {"tokens": int(live.sum()), "coefficient": list(fits.values())}
    yield Statement("entropy", text, tuple(dict.fromkeys(names)), evidence)


def _spread(mask: Mask, values: Floats, middle: float) -> float:
    """Return the relative spread of nine tenths of the tokens: single ones may be ill-conditioned."""
    return float(np.quantile(np.abs(values - middle), 0.9)) / abs(middle)
