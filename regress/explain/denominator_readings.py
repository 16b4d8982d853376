"""Readings of the factor of a fit: the denominator, or how far the gradients are from every known one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regress.explain.aggregation_weights import AggregationRule, whole_length
from regress.explain.hypothesis_search import Found, Match
from regress.explain.loss_tokens import Mask
from regress.explain.term_derivatives import PRODUCT, shifts

EXACT = 2e-5
"""Relative error at which a factor counts as 1 (or as the number of ranks), if noise is smaller."""


@dataclass(frozen=True)
class Reading:
    """A match with one rule of weights, and the factor that remains: 1 if nothing does.

    Attributes:
        length: the constant length of the denominator, where the rule has one.
        cause: name of the factor, such as "the number of ranks"; empty for 1 or an unknown factor.
    """

    match: Match
    rule: AggregationRule
    factor: float
    length: int | None = None
    cause: str = ""

    def named(self, exact: float) -> bool:
        """Return True if the factor is 1 or has a cause."""
        return bool(self.cause) or abs(self.factor - 1) <= exact

    @property
    def words(self) -> str:
        """Weight in words, with its constant length."""
        words = self.rule.words
        if self.length is not None and self.rule.length == "free":
            words = words.replace("a constant length", f"the constant length {self.length}")
        return f"{words}, of {self.match.factor.name}" if self.of_product else words

    @property
    def of_product(self) -> bool:
        """Return True if whole samples have a weight by the product of their ratios."""
        return self.match.factor.name.startswith(PRODUCT)


def read(found: Found, mask: Mask) -> list[Reading]:
    """Return readings with factor 1, else those with a named factor, else all; global denominators first."""
    exact = max(EXACT, found.tolerance)
    every = [
        reading
        for match in found.matches
        for rule in match.rules
        for reading in _read(match, rule, mask, exact)
        if not _is_shift(match, found) or (reading.named(exact) and match.fit.penalty * match.fit.scale > 0)
    ]
    ones = [r for r in every if not r.cause and abs(r.factor - 1) <= exact]
    if ones:
        return _unique(ones)
    named = [r for r in every if r.cause]
    return _unique(named or [r for r in every if r.rule.length != "free"] or every)


def _is_shift(match: Match, found: Found) -> bool:
    """Return True if the KL has the derivative of one constant in every advantage, as a whitening may have."""
    return match.penalty is not None and shifts(match.penalty, match.factor, found.tokens)


def _read(match: Match, rule: AggregationRule, mask: Mask, exact: float) -> list[Reading]:
    factor = match.scale(rule)
    if rule.length == "free":
        return _constant(match, rule, factor, mask)
    if abs(factor - 1) <= exact:
        return [Reading(match, rule, factor)]
    causes = [name for name, value in _named(mask).items() if abs(factor / value - 1) <= exact]
    return [Reading(match, rule, factor, cause=" or ".join(causes))]


def _constant(match: Match, rule: AggregationRule, factor: float, mask: Mask) -> list[Reading]:
    """Return the reading whose constant length is a whole number that fits every completion, if any."""
    if factor <= 0:
        return []
    length = whole_length(1 / factor)
    truncated = {
        len(t.tokens) - t.prompt_length for t in mask.update.trajectories if t.finish_reason == "length"
    }
    fits = length is not None and length >= mask.spans.max(initial=0)
    if fits and (len(truncated) != 1 or length in truncated):
        return [Reading(match, rule, 1.0, length)]
    return []


def _named(mask: Mask) -> dict[str, float]:
    """Return named factors: ranks and microbatches, forgotten or counted twice."""
    ranks = len({rank for rank, _ in mask.update.blocks})
    per_rank = len(mask.update.blocks) / ranks
    found: dict[str, float] = {}
    if ranks > 1:
        found |= {"the number of ranks": ranks, "1 over the number of ranks": 1 / ranks}
    if per_rank > 1:
        found |= {"the number of microbatches": per_rank, "1 over the number of microbatches": 1 / per_rank}
    if ranks > 1 and per_rank > 1:
        both = ranks * per_rank
        found |= {
            "the number of ranks times that of microbatches": both,
            "1 over the number of ranks and microbatches": 1 / both,
        }
    return found


def _unique(readings: list[Reading]) -> list[Reading]:
    """Return one reading of each advantage, weight, ratio and KL, with the best of the constants beside a deviation."""
    best: dict[tuple[object, ...], Reading] = {}
    for reading in readings:
        m = reading.match
        key = (
            m.advantages.name,
            reading.rule.words,
            reading.length,
            m.factor.name,
            None if m.penalty is None else m.penalty.name,
        )
        if key not in best or m.fit.unexplained < best[key].match.fit.unexplained:
            best[key] = reading
    return sorted(best.values(), key=lambda r: (_order(r), r.of_product, r.match.fit.unexplained))


_SCOPES = ("global", "microbatch", "rank", "microbatch over ranks")


def _order(reading: Reading) -> int:
    return _SCOPES.index(reading.rule.scope)


def epsilons(found: Found, reading: Reading) -> list[float]:
    """Return the constants beside the deviation that fit as well as that of a reading."""
    same = {
        match.advantages.eps
        for match in found.matches
        if match.advantages.name == reading.match.advantages.name
        and any(
            np.isclose(match.scale(rule), reading.match.scale(reading.rule), rtol=1e-3)
            for rule in match.rules
        )
    }
    return sorted(eps for eps in same if eps is not None)
