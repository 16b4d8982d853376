"""Fitting hypotheses to token gradients: two factors, and which tokens are clipped.

Hypotheses that differ in their second term or in where the search begins are fitted together, a row each: arrays are
``[rows, tokens]``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from regress.explain.update_tokens import Bools, Floats, Ints

ROUNDS = 6
FEW = 8
"""Number of tokens below which no share of them is taken."""
SHARES = (0.5, 0.25, 0.1)
ODD = 1e-3
"""Relative error of a token above which neither the whole policy term nor none explains it."""
DONE = 1e-6
"""Unexplained part at which the search for another classification ends."""
PARALLEL = 1e-12
"""Squared sine of the angle between two terms below which they are not told apart."""
ELEMENTS = 2**20
"""Number of elements of an array in which rows are fitted together."""


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


def fit_all(g: Floats, policy: Floats, kl: Floats | None = None) -> list[Fit | None]:
    """Fit all tokens with one factor for each term.

    Args:
        kl: second terms, ``[rows, tokens]``; None: one row without any.

    Returns:
        A fit for each row; None where a term vanishes or the two are parallel.
    """
    used = np.ones((1 if kl is None else len(kl), len(g)), bool)
    if not g.any():
        return [None] * len(used)
    scale, penalty, known = _solve(g, policy, kl, used)
    rest = g - scale[:, None] * policy - (0.0 if kl is None else penalty[:, None] * kl)
    unexplained = _norms(rest) / _norms(g[None])
    none = np.zeros(len(g), bool)
    return [
        Fit(float(scale[row]), float(penalty[row]), float(unexplained[row]), none) if known[row] else None
        for row in range(len(used))
    ]


def fit_clipped(g: Floats, base: Floats, factor: Floats, kl: Floats | None = None) -> list[Fit | None]:
    """Fit the tokens that have the policy term in full, and tell those that have none, or a capped one.

    Args:
        base: the policy term without its ratio; `factor` is the ratio. The nearest to 1 are the last to be clipped.
        kl: second terms, ``[rows, tokens]``; None: one row without any.

    Returns:
        For each row the fit in which every token is explained, or else the best one.
    """
    count = 1 if kl is None else len(kl)
    if not g.any():
        return [None] * count
    starts = _starts(g, base * factor, np.abs(np.log(np.maximum(factor, 1e-300))))
    together = max(1, ELEMENTS // max(1, starts.size))
    out: list[Fit | None] = []
    for begin in range(0, count, together):
        some = kl if kl is None else kl[begin : begin + together]
        rows = min(together, count - begin)
        found = _classified(
            g,
            base,
            factor,
            some if some is None else np.repeat(some, len(starts), 0),
            np.tile(starts, (rows, 1)),
        )
        out += [found.best_of(row * len(starts), (row + 1) * len(starts)) for row in range(rows)]
    return out


@dataclass
class _Rows:
    """Fits of some rows; `unexplained` is infinite where there is none, `caps` NaN, ``[rows, 2]``."""

    scale: Floats
    penalty: Floats
    unexplained: Floats
    clipped: Bools
    caps: Floats

    def take(self, places: Ints, other: _Rows, rows: Bools) -> None:
        """Put some rows of another in place of these."""
        for each in fields(self):
            getattr(self, each.name)[places] = getattr(other, each.name)[rows]

    def best_of(self, begin: int, end: int) -> Fit | None:
        """Return the first of some rows that explains every token, or else the best; None if none has a fit."""
        unexplained = self.unexplained[begin:end]
        done = unexplained < DONE
        row = begin + int(np.argmax(done) if done.any() else np.argmin(unexplained))
        if not np.isfinite(self.unexplained[row]):
            return None
        lower, upper = (None if np.isnan(cap) else float(cap) for cap in self.caps[row])
        return Fit(
            float(self.scale[row]),
            float(self.penalty[row]),
            float(self.unexplained[row]),
            self.clipped[row].copy(),
            (lower, upper),
        )


def _starts(g: Floats, policy: Floats, near: Floats) -> Bools:
    """Return sets of tokens to begin with: with a gradient, next to ratio 1, with the policy's sign."""
    alive = (np.abs(policy) > 0) & (g != 0)
    bounds = np.quantile(near[alive], SHARES) if alive.sum() >= FEW else [np.inf] * len(SHARES)
    shares = [alive & (near <= bound) for bound in bounds]
    return np.stack([alive, *shares, alive & (np.sign(g) == np.sign(policy))])


def _classified(g: Floats, base: Floats, factor: Floats, kl: Floats | None, used: Bools) -> _Rows:
    """Classify the tokens of each row again and again, from those `used` first, and return the best of each."""
    full = np.abs(base * factor) > 0
    count = len(used)
    none, unknown = np.zeros(count), np.full((count, 2), np.nan)
    best = _Rows(none, none.copy(), np.full(count, np.inf), np.zeros_like(used), unknown)
    active = np.arange(count)
    for _ in range(ROUNDS):
        found, capped = _classify(g, base, factor, None if kl is None else kl[active], used | ~full)
        better = found.unexplained < best.unexplained[active]
        best.take(active[better], found, better)
        again = full & ~found.clipped & ~capped
        open_ = np.isfinite(found.unexplained) & (best.unexplained[active] >= DONE) & (again != used).any(1)
        active, used = active[open_], again[open_]
        if not len(active):
            break
    return best


def _classify(g: Floats, base: Floats, factor: Floats, kl: Floats | None, used: Bools) -> tuple[_Rows, Bools]:
    """Solve on the tokens `used`, then tell for every token whether it has the policy term, and which are capped."""
    policy = base * factor
    scale, penalty, known = _solve(g, policy, kl, used)
    whole = scale[:, None] * policy
    rest = np.broadcast_to(g, used.shape) if kl is None else g - penalty[:, None] * kl
    clipped = np.abs(rest) < np.abs(rest - whole)
    own = np.where(clipped, 0.0, whole)
    odd = np.abs(rest - own) > ODD * np.abs(whole)
    capped = np.zeros_like(clipped)
    caps = np.full((len(used), 2), np.nan)
    for side, there in enumerate((factor < 1, factor > 1)):
        tokens = odd & (there & (base != 0))
        rows = np.flatnonzero(tokens.any(1))
        if not len(rows):
            continue
        cap = _caps(rest[rows], scale[rows, None] * base, factor, own[rows], tokens[rows], above=side == 1)
        usable = tokens[rows] & ~np.isnan(cap)[:, None]
        own[rows] = np.where(usable, scale[rows, None] * base * cap[:, None], own[rows])
        capped[rows] |= usable
        caps[rows, side] = cap
    unexplained = np.where(known, _norms(rest - own) / _norms(g[None]), np.inf)
    return _Rows(scale, penalty, unexplained, clipped & ~capped, caps), capped


def _caps(g: Floats, base: Floats, factor: Floats, own: Floats, odd: Bools, *, above: bool) -> Floats:
    """Return for each row the ratio that all `odd` tokens, and no others, have in place of a larger or smaller one.

    NaN where there is no such ratio.
    """
    rows = np.arange(len(odd))
    with np.errstate(divide="ignore", invalid="ignore"):  # tokens that are not odd, and a scale of 0
        implied = g / base
        first = implied[rows, odd.argmax(1)]
        spread = np.where(odd, implied, -np.inf).max(1) - np.where(odd, implied, np.inf).min(1)
        cap = np.where(odd, implied, 0.0).sum(1) / odd.sum(1)
    beyond = (factor > cap[:, None]) if above else (factor < cap[:, None])
    wrong = np.where(odd, ~beyond, beyond & (own != 0)).any(1)
    return np.where((first > 0) & (spread <= ODD * first) & ~wrong, cap, np.nan)


def _solve(g: Floats, policy: Floats, kl: Floats | None, used: Bools) -> tuple[Floats, Floats, Bools]:
    """Return the two factors of each row by least squares over the tokens `used`, and which rows have them."""
    own, some = np.where(used, g, 0.0), np.where(used, policy, 0.0)
    size = _norms(some)
    known = (size > 0) & (_norms(own) > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        a = some / size[:, None]
        if kl is None:
            scale = np.einsum("rt,rt->r", a, own) / size
            return np.where(known, scale, 0.0), np.zeros(len(used)), known
        other = np.where(used, kl, 0.0)
        length = _norms(other)
        b = other / length[:, None]
        cosine = np.einsum("rt,rt->r", a, b)
        sine2 = 1 - cosine**2
        known &= (length > 0) & (sine2 >= PARALLEL)
        da, db = np.einsum("rt,rt->r", a, own), np.einsum("rt,rt->r", b, own)
        scale, penalty = (da - cosine * db) / sine2 / size, (db - cosine * da) / sine2 / length
    return np.where(known, scale, 0.0), np.where(known, penalty, 0.0), known


def _norms(values: Floats) -> Floats:
    return np.asarray(np.sqrt(np.einsum("rt,rt->r", values, values)), np.float64)
