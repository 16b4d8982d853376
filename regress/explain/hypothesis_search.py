"""The search for hypotheses that explain the token gradients of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from regress.explain.advantage_candidates import Advantages
from regress.explain.aggregation_weights import AggregationRule
from regress.explain.hypothesis_fit import Fit, fit_all, fit_clipped
from regress.explain.loss_tokens import IDLE, Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.term_derivatives import Factor, Penalty, factors, penalties
from regress.explain.update_tokens import Bools, Floats, Ints

TOLERANCE = 1e-5
"""Relative norm that may stay unexplained: what trainers lose by computing advantages and losses in float32."""
NOISE = 20.0
"""Multiple of the gradients' own noise that may stay unexplained, where that is more."""
PROMISING = 5e-3
"""Unexplained part up to which another constant beside the deviation may make a hypothesis fit."""
SCREENED = 3000
"""Number of tokens on which hypotheses are tried first."""
SAMPLES = 3
"""Least number of samples with an advantage needed to tell hypotheses apart."""

WHOLE = 2
"""Least number of samples with a policy term that is neither clipped nor capped: the gradients of one fit anything."""


_NOT_YET = Fit(0.0, 0.0, np.inf, np.zeros(0, bool))


@dataclass(frozen=True)
class Match:
    """A hypothesis that explains the gradients, and the rules of weights that are the same but for a factor."""

    advantages: Advantages
    rules: tuple[AggregationRule, ...]
    factor: Factor
    penalty: Penalty | None
    fit: Fit
    token: int

    def scale(self, rule: AggregationRule) -> float:
        """Return the factor between the gradients and what a rule of the same direction predicts."""
        return float(self.fit.scale * self.rules[0].values[self.token] / rule.values[self.token])


@dataclass(frozen=True)
class Found:
    """Result of the search; ``nearest`` is the smallest part that a rejected hypothesis left unexplained."""

    matches: tuple[Match, ...]
    tolerance: float
    noise: float
    tokens: Ints
    nearest: float


def search(mask: Mask, known: Policies, advantages: list[Advantages], rules: list[AggregationRule]) -> Found:
    """Try every combination of advantages, weights, ratio and KL, and keep those that explain the gradients.

    If none explains all samples, those without any gradient are left out: they may have been dropped.
    """
    whole = _search(mask, known, advantages, rules, mask.effective)
    if whole.matches or mask.speaking.all():
        return whole
    part = _search(mask, known, advantages, rules, mask.effective & mask.speaking[mask.update.sample])
    return part if part.matches else whole


def _search(
    mask: Mask, known: Policies, advantages: list[Advantages], rules: list[AggregationRule], used: Bools
) -> Found:
    noise = mask.noise
    tolerance = max(TOLERANCE, NOISE * noise)
    used = used if mask.left_out is None else used & ~mask.left_out
    tokens = np.flatnonzero(used & mask.known & (mask.update.block >= 0))
    some = tokens[:: max(1, -(-len(tokens) // SCREENED))]
    matches, nearest = [], np.inf
    for match in _hypotheses(mask, known, advantages, _classes(rules, tokens), some, 3 * tolerance):
        if len(some) < len(tokens) and match.fit.unexplained <= 3 * tolerance:
            again = _fits(mask, match, {0: match.penalty}, tokens)
            match = replace(match, fit=again.get(0, match.fit))
        if match.fit.unexplained <= tolerance and _supported(mask, match, tokens):
            matches.append(match)
        else:
            nearest = min(nearest, match.fit.unexplained)
    return Found(tuple(matches), tolerance, noise, tokens, float(nearest))


def _supported(mask: Mask, match: Match, tokens: Ints) -> bool:
    """Return True if enough samples have the policy term in full, neither clipped nor capped."""
    advantages, fit = match.advantages.values[tokens], match.fit
    factor = match.factor.of(advantages, tokens)
    weights = match.factor.weighed(match.rules[0].values[tokens], tokens)
    own = np.abs(advantages * weights * factor * fit.scale)
    whole = own > IDLE * np.abs(mask.g[tokens]).max(initial=0.0)
    if len(fit.clipped) == len(tokens):
        whole[fit.clipped] = False
    low, high = fit.caps
    whole &= (factor >= (low or -np.inf)) & (factor <= (high or np.inf))
    return len(np.unique(mask.update.sample[tokens][whole])) >= WHOLE


def _classes(rules: list[AggregationRule], tokens: Ints) -> list[tuple[AggregationRule, ...]]:
    """Return classes of rules whose weights differ by a factor only, without rules that lack a weight."""
    classes: list[list[AggregationRule]] = []
    units: list[Floats] = []
    for rule in rules:
        own = rule.values[tokens]
        if not len(own) or not np.isfinite(own).all() or not own.any():
            continue
        unit = own / _size(own)
        same = next((i for i, other in enumerate(units) if np.abs(unit - other).max() < 1e-12), None)
        if same is None:
            classes.append([rule])
            units.append(unit)
        else:
            classes[same].append(rule)
    return [tuple(members) for members in classes]


def _hypotheses(
    mask: Mask,
    known: Policies,
    advantages: list[Advantages],
    classes: list[tuple[AggregationRule, ...]],
    tokens: Ints,
    tolerance: float,
) -> Iterator[Match]:
    ratios = factors(mask, known)
    terms: list[Penalty | None] = [None, *penalties(mask, known)]
    sample = mask.update.sample[tokens]
    same = _repeated(terms, tokens)
    near: dict[str, set[tuple[int, int, int]]] = {}
    tried: list[tuple[Floats, dict[tuple[int, int, int], Fit]]] = []
    for advantage in advantages:
        own = advantage.values[tokens]
        if not np.isfinite(own).all() or len(np.unique(sample[own != 0])) < SAMPLES:
            continue
        first = advantage.name not in near
        promising = near.setdefault(advantage.name, set())
        known_fits, ratio = _proportional(own, tried)
        for (i, members), (j, factor) in product(enumerate(classes), enumerate(ratios)):
            counted = int(tokens[np.flatnonzero(members[0].values[tokens])[0]])
            bare = Match(advantage, members, factor, None, _NOT_YET, counted)
            candidates = [k for k in range(len(terms)) if first or (i, j, k) in promising]
            for part in ([k for k in candidates if terms[k] is None], [k for k in candidates if terms[k]]):
                missing = {same[k]: terms[same[k]] for k in part if (i, j, same[k]) not in known_fits}
                for k, found in _fits(mask, bare, missing, tokens).items():
                    known_fits[i, j, k] = replace(found, scale=found.scale * ratio)
                fits = {k: fit for k in part if (fit := known_fits.get((i, j, same[k]))) is not None}
                promising |= {(i, j, k) for k, fit in fits.items() if fit.unexplained < PROMISING}
                for k, fit in fits.items():
                    yield replace(bare, penalty=terms[k], fit=replace(fit, scale=fit.scale / ratio))
                if any(fit.unexplained <= tolerance for fit in fits.values()):
                    break


def _repeated(terms: list[Penalty | None], tokens: Ints) -> list[int]:
    """Return the index of the first KL with the same derivative, for each."""
    out: list[int] = []
    for k, term in enumerate(terms):
        first = (
            i
            for i, other in enumerate(terms[:k])
            if term is not None
            and other is not None
            and np.allclose(term.values[tokens], other.values[tokens], rtol=1e-12, atol=0, equal_nan=True)
        )
        out.append(next(first, k))
    return out


def _proportional(
    own: Floats, tried: list[tuple[Floats, dict[tuple[int, int, int], Fit]]]
) -> tuple[dict[tuple[int, int, int], Fit], float]:
    """Return the fits of advantages that differ from these by a factor only, and that factor."""
    size = _size(own)
    unit = own / size
    for other, fits in tried:
        if np.abs(unit - other).max() < 1e-12:
            return fits, size
    tried.append((unit, {}))
    return tried[-1][1], size


def _fits(mask: Mask, match: Match, terms: Mapping[int, Penalty | None], tokens: Ints) -> dict[int, Fit]:
    """Fit a hypothesis with each of some KL terms, of which either all or none is None; leave out what has no fit."""
    weights = match.rules[0].values[tokens]
    advantages = match.advantages.values[tokens]
    base, factor = -advantages * match.factor.weighed(weights, tokens), match.factor.of(advantages, tokens)
    g = mask.g[tokens]
    kl = {k: None if term is None else term.values[tokens] * weights for k, term in terms.items()}
    kl = {k: values for k, values in kl.items() if values is None or np.isfinite(values).all()}
    if not kl or not np.isfinite(factor).all():
        return {}
    given = [values for values in kl.values() if values is not None]
    rows = np.array(given) if given else None
    found = fit_clipped(g, base, factor, rows) if match.factor.clips else fit_all(g, base * factor, rows)
    return {k: one for k, one in zip(kl, found, strict=True) if one is not None}


def clipped_tokens(match: Match, found: Found, size: int) -> Bools:
    """Return the tokens of the frame that a match takes as clipped."""
    out = np.zeros(size, bool)
    if len(match.fit.clipped) == len(found.tokens):
        out[found.tokens] = match.fit.clipped
    return out


def _size(values: Floats) -> float:
    return float(np.sqrt(values @ values))
