"""Fitting a hypothesis to token gradients: two factors, and which tokens are clipped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regress.explain.update import Bools, Floats

ROUNDS = 6
FEW = 8
"""Number of tokens below which no share of them is taken."""
SHARES = (0.5, 0.25, 0.1)
ODD = 1e-3
"""Relative error of a token above which neither the whole policy term nor none explains it."""
DONE = 1e-6
"""Unexplained part at which the search for another classification ends."""


@dataclass(frozen=True)
class Fit:
    """``g = scale x policy + penalty x kl`` by least squares.

    Attributes:
        scale, penalty: the two factors; `penalty` is 0 without a second term.
        unexplained: norm of the rest over the norm of g.
        clipped: tokens that have no policy term.
        caps: ratios at which the policy term is held, the lower and the upper one; None where it is not.
    """

    scale: float
    penalty: float
    unexplained: float
    clipped: Bools
    caps: tuple[float | None, float | None] = (None, None)


def fit(g: Floats, policy: Floats, kl: Floats | None = None) -> Fit | None:
    """Fit all tokens with one factor for each term; None if a term vanishes or the two are parallel."""
    solved = _solve(g, policy, kl)
    if solved is None:
        return None
    scale, penalty, rest = solved
    return Fit(scale, penalty, _norm(rest) / _norm(g), np.zeros(len(g), bool))


def fit_clipped(g: Floats, base: Floats, factor: Floats, kl: Floats | None) -> Fit | None:
    """Fit the tokens that have the policy term in full, and tell those that have none, or a capped one.

    Args:
        base: the policy term without its ratio; `factor` is the ratio. The nearest to 1 are the last to be clipped.

    Returns:
        The fit in which every token is explained, or else the best one.
    """
    best: Fit | None = None
    full = np.abs(base * factor) > 0
    tried: set[bytes] = set()
    for start in _starts(g, base * factor, full, np.abs(np.log(np.maximum(factor, 1e-300)))):
        used = start
        for _ in range(ROUNDS):
            if (key := used.tobytes()) in tried:
                break
            tried.add(key)
            classified = _classify(g, base, factor, kl, used | ~full)
            if classified is None:
                break
            found, capped = classified
            if best is None or found.unexplained < best.unexplained:
                best = found
            if best.unexplained < DONE:
                break
            used = full & ~found.clipped & ~capped
        if best is not None and best.unexplained < DONE:
            break
    return best


def _starts(g: Floats, policy: Floats, full: Bools, near: Floats) -> list[Bools]:
    """Return sets of tokens to begin with: with a gradient, next to ratio 1, with the policy's sign."""
    alive = full & (g != 0)
    bounds = np.quantile(near[alive], SHARES) if alive.sum() >= FEW else [np.inf] * len(SHARES)
    shares = [alive & (near <= bound) for bound in bounds]
    return [alive, *shares, alive & (np.sign(g) == np.sign(policy))]


def _classify(
    g: Floats, base: Floats, factor: Floats, kl: Floats | None, used: Bools
) -> tuple[Fit, Bools] | None:
    """Solve on the tokens `used`, then tell for every token whether it has the policy term, and which are capped."""
    policy = base * factor
    solved = _solve(g[used], policy[used], None if kl is None else kl[used])
    if solved is None:
        return None
    scale, penalty, _ = solved
    without = np.zeros_like(g) if kl is None else penalty * kl
    clipped = np.abs(g - without) < np.abs(g - without - scale * policy)
    own = np.where(clipped, 0.0, policy)
    capped = np.zeros_like(clipped)
    caps: list[float | None] = []
    for above in (False, True):
        cap, tokens = _cap(g - without, scale * base, factor, own * scale, above)
        caps.append(cap)
        if cap is not None:
            own, capped = np.where(tokens, base * cap, own), capped | tokens
    rest = g - without - scale * own
    return Fit(scale, penalty, _norm(rest) / _norm(g), clipped & ~capped, (caps[0], caps[1])), capped


def _cap(
    g: Floats, base: Floats, factor: Floats, predicted: Floats, above: bool
) -> tuple[float | None, Bools]:
    """Return the ratio that all tokens beyond it have in place of their own, and these tokens."""
    odd = (np.abs(g - predicted) > ODD * np.abs(base * factor)) & (base != 0)
    odd &= (factor > 1) if above else (factor < 1)
    if not odd.any():
        return None, odd
    implied = g[odd] / base[odd]
    cap = float(implied[0])
    if cap <= 0 or float(np.ptp(implied)) > ODD * cap:
        return None, odd
    cap = float(implied.mean())
    beyond = (factor > cap) if above else (factor < cap)
    if not beyond[odd].all() or (beyond & ~odd & (predicted != 0)).any():
        return None, odd
    return cap, odd


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
    return float(np.sqrt(values @ values))
