"""What the derivatives by the entropy say: whether the loss has a bonus, its coefficient and its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.explain.loss import either
from regress.explain.mask import Mask
from regress.explain.search import noise_of
from regress.explain.statement import Statement
from regress.explain.update import Bools, Floats
from regress.explain.weights import Rule

PRESENT = 20.0
"""Times its standard error that the mean derivative has to be for a bonus to count as there."""
FLAT = 1e-3
"""Relative spread up to which the derivatives of a weight rule count as those of one coefficient."""
ABSENT = 1e-3
"""Derivative by the entropy, relative to the largest by a log-prob, up to which its absence counts as shown."""


def entropies(mask: Mask, rules: list[Rule]) -> Iterator[Statement]:
    """Statements on the entropy bonus; none where its derivatives are too noisy to tell."""
    if "token_gradient/entropy_gradient" not in mask.update.values or not mask.policy.any():
        return
    tokens = mask.known & (mask.update.block >= 0)
    largest = float(np.abs(mask.g[mask.policy]).max())
    h = mask.h[tokens]
    live = _live(mask, tokens)
    if not live.any():
        rms = float(np.sqrt(np.mean(h[h != 0] ** 2))) if (h != 0).any() else 0.0
        if rms <= ABSENT * largest:
            evidence: dict[str, Any] = {
                "largest derivative": float(np.abs(h).max(initial=0.0)),
                "by log-prob": largest,
            }
            yield Statement("entropy", "no entropy has a gradient", ("none",), evidence)
        return
    yield from _bonus(mask, rules, live)
    outside = live & ~(mask.effective if mask.expected is None else mask.expected)
    if mask.expected is not None and outside.any():
        count = int(outside.sum())
        text = f"{count} tokens outside of {mask.source} have an entropy bonus"
        evidence = {"tokens": count, "inside": int((live & ~outside).sum())}
        yield Statement("entropy", text, ("masked tokens",), evidence, departure=True)


def _live(mask: Mask, tokens: Bools) -> Bools:
    """Tokens with a derivative by their entropy; none where its mean cannot be told from noise."""
    out = tokens & (mask.h != 0)
    h = mask.h[out]
    if not len(h):
        return out
    if "token_gradient/token_residual" not in mask.update.values:
        return out  # exact derivatives
    middle = float(np.median(h))
    error = 1.2533 * 1.4826 * float(np.median(np.abs(h - middle))) / np.sqrt(len(h))
    floor = 1e-5 * float(np.abs(mask.g[mask.policy]).max()) * max(1.0, noise_of(mask) / 1e-6)
    if abs(middle) <= max(PRESENT * error, 0.0) and np.abs(h).max() <= 10 * floor:
        return np.zeros_like(out)
    return out if abs(middle) > 10 * floor / 100 and np.abs(h).max() > floor else np.zeros_like(out)


def _bonus(mask: Mask, rules: list[Rule], live: Bools) -> Iterator[Statement]:
    """The coefficient under every rule of weights that the derivatives follow."""
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
    """Relative spread of nine tenths of the tokens: single ones may be ill-conditioned."""
    return float(np.quantile(np.abs(values - middle), 0.9)) / abs(middle)
