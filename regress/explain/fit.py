"""Fitting a hypothesis to token gradients: two factors, and which tokens are clipped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regress.explain.update import Bools, Floats

ROUNDS = 6


@dataclass(frozen=True)
class Fit:
    """``g = scale x policy + penalty x kl`` by least squares.

    Attributes:
        scale, penalty: the two factors; `penalty` is 0 without a second term.
        unexplained: norm of what is left over the norm of g.
        clipped: tokens that have no policy term.
    """

    scale: float
    penalty: float
    unexplained: float
    clipped: Bools


def fit(g: Floats, policy: Floats, kl: Floats | None = None) -> Fit | None:
    """Fit all tokens with one factor for each term; None if a term vanishes or the two are parallel."""
    solved = _solve(g, policy, kl)
    if solved is None:
        return None
    scale, penalty, rest = solved
    return Fit(scale, penalty, _norm(rest) / _norm(g), np.zeros(len(g), bool))


def fit_clipped(g: Floats, policy: Floats, kl: Floats | None, near: Floats) -> Fit | None:
    """Fit the tokens that have the policy term, and tell those that have none.

    Args:
        near: distance of each token's ratio from 1: the nearest are the last to be clipped.

    Returns:
        The fit in which every token is explained, with or without the policy term, or else the best one.
    """
    best: Fit | None = None
    full = np.abs(policy) > 0
    for start in _starts(g, policy, full, near):
        used = start
        for _ in range(ROUNDS):
            found = _classify(g, policy, kl, used)
            if found is None:
                break
            if best is None or found.unexplained < best.unexplained:
                best = found
            again = full & ~found.clipped
            if (again == used).all():
                break
            used = again
    return best


def _starts(g: Floats, policy: Floats, full: Bools, near: Floats) -> list[Bools]:
    """Sets of tokens to begin with: those with a gradient; the half next to ratio 1; those of the policy's sign."""
    alive = full & (g != 0)
    half = alive & (near <= np.median(near[alive])) if alive.any() else alive
    return [alive, half, alive & (np.sign(g) == np.sign(policy))]


def _classify(g: Floats, policy: Floats, kl: Floats | None, used: Bools) -> Fit | None:
    """Solve on the tokens `used`, then say of every token whether it has the policy term."""
    solved = _solve(g[used], policy[used], None if kl is None else kl[used])
    if solved is None:
        return None
    scale, penalty, _ = solved
    without = np.zeros_like(g) if kl is None else penalty * kl
    with_term = without + scale * policy
    clipped = np.abs(g - without) < np.abs(g - with_term)
    rest = g - np.where(clipped, without, with_term)
    return Fit(scale, penalty, _norm(rest) / _norm(g), clipped)


def _solve(g: Floats, policy: Floats, kl: Floats | None) -> tuple[float, float, Floats] | None:
    size = _norm(policy)
    if size == 0 or _norm(g) == 0:
        return None
    if kl is None:
        scale = float(policy @ g) / size**2
        return scale, 0.0, g - scale * policy
    other = _norm(kl)
    if other == 0:
        return None
    a, b = policy / size, kl / other
    cosine = float(a @ b)
    sine2 = 1 - cosine**2
    if sine2 < 1e-12:
        return None
    da, db = float(a @ g), float(b @ g)
    scale, penalty = (da - cosine * db) / sine2, (db - cosine * da) / sine2
    return scale / size, penalty / other, g - scale * a - penalty * b


def _norm(values: Floats) -> float:
    return float(np.sqrt(np.sum(values * values)))
