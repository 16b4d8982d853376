"""Tokens at a bound of the clip range: rounding decides which branch of the loss they take, and both are right.

The gradient of a clipped token is 0, however fine the dtype, and that of its neighbour is not. A token may take the
branch that the golden side has not taken if the bound lies within its own rounding: between the ratios that the two
sides recorded for it, or as close to them as its log-probs are rounded. What it may then be is computed from what is
recorded: 0 for a clipped one; else its ratio times the gradient per ratio of the other tokens of its sample, which
share advantage and weight. A wrong bound clips tokens that lie further away, and stays a difference. What a KL term
adds, which no clip stops, is first taken from the gradients of each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows
from regress.compare.alignment.canonical_projection import Projection
from regress.compare.diagnosis.token_hypotheses import clip_range
from regress.compare.dumps.canonical_values import earlier_updates, golden_update, merged
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.frame_mapping import in_frame, numbers
from regress.compare.dumps.kl_gradient import kl_gradient
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.recorded_clipping import NOTHING
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.dumps.tolerance_bounds import spacing
from regress.compare.dumps.unit_work import UnitWork
from regress.compare.quantities import QuantitySource
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.layout import SampleKey, TokenFrame

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Earlier: TypeAlias = Callable[[], Iterable[Projection]]
"""Function that returns the updates before one, in order."""
Judged: TypeAlias = Callable[..., Finding]
"""Function of a tensor beside its golden values, and of a tolerance in place of its own."""

QUANTITY = "token_gradient"
"""Quantity that jumps where a token is clipped."""
CLIPPED = (
    "a token is clipped or is not, however coarse the dtype, and the ratio of this one lies away from the bound by "
    "more than rounding"
)
"""Reason for the tolerance of a token that another clip range stops or lets through."""
SOMETHING = 1e-2
"""Gradient of a token that was not clipped, relative to the largest."""


@dataclass(frozen=True, eq=False)
class Side:
    """Values of the tokens of an update on one side, ``[frame.size]``; NaN where nothing is recorded.

    Attributes:
        log_ratio: of policy and old log-prob.
        size: sum of the absolute values of the two log-probs, which is what is rounded.
        gradient: that of the policy loss, without what a KL term adds.
    """

    log_ratio: Floats
    size: Floats
    gradient: Floats

    @classmethod
    def of(
        cls,
        known: Projection,
        earlier: Earlier,
        names: Mapping[SampleKey, SampleKey] | None,
        frame: TokenFrame,
    ) -> Side | None:
        """Return the values of an update in the order of a frame; None if it lacks one of them.

        Args:
            earlier: tells the log-probs before the first update with the same samples, where none are recorded.
            names: own key of a sample -> the key in the frame; None if they are the same.
        """
        found = [_flat(known, quantity) for quantity in ("log_probs", "old_log_probs", QUANTITY)]
        if found[1] is None:
            found[1] = _first(known.frame, earlier())
        if any(values is None for values in found):
            return None
        found.append(_flat(known, "ref_log_probs"))
        now, old, gradient, *ref = (
            in_frame(v, known.frame, names, frame, np.nan) for v in found if v is not None
        )
        for one in ref:
            for own in map(slice, frame.offsets[:-1], frame.offsets[1:]):
                gradient[own] -= kl_gradient(gradient[own], (now - old)[own], (now - one)[own])
        return cls(now - old, np.abs(now) + np.abs(old), gradient)


@dataclass(frozen=True, eq=False)
class Taken:
    """Tokens of a record that took the other branch than the golden side, and may have.

    Attributes:
        rows: the rows, with the golden values of these tokens.
        share: part of the norm of all token gradients of the update.
    """

    rows: TokenRows
    count: int
    share: float

    def note(self, place: Place) -> str:
        """Return the note on them."""
        many = f"{self.count} token{'s' * (self.count > 1)}"
        return (
            f"{place}: {many} lie at a bound of the clip range, on the other side of it than in the golden dump, and "
            "by no more than rounding: their gradients are those of the other branch, and count as equal"
        )


@dataclass(frozen=True, eq=False)
class Branches:
    """Both sides of the tokens of an update, and the bounds of the ratio.

    Attributes:
        bounds: interval of the logarithm of the lowest and of the highest ratio, which both lie in; ends are equal
            where the configuration tells them.
        spacing: that of the dtype which log-probs are rounded to.
        log_probs: tolerance of log-probs: beyond it the ratios are other ones, and not by rounding.
    """

    frame: TokenFrame
    golden: Side
    actual: Side
    bounds: tuple[tuple[float, float], tuple[float, float]]
    spacing: float
    log_probs: Tolerance

    @classmethod
    def of(
        cls,
        golden: tuple[Projection, Earlier],
        actual: tuple[Projection, Earlier],
        names: Mapping[SampleKey, SampleKey],
        config: Mapping[str, Any],
        spacing: float,
        log_probs: Tolerance,
    ) -> Branches | None:
        """Return the branches of an update; None where nothing tells ratios, or the clip is of whole samples.

        Args:
            names: actual key of a sample -> golden key.
        """
        objective = config.get("algorithm")
        settings = objective if isinstance(objective, Mapping) else {}
        if settings.get("importance_level", "token") != "token":
            return None
        frame = golden[0].frame
        own, theirs = Side.of(*golden, None, frame), Side.of(*actual, names, frame)
        if own is None or theirs is None:
            return None
        clip = clip_range(settings)
        if clip is None:
            bounds = _seen(own, frame, -1), _seen(own, frame, 1)
        else:
            low, high = (float(np.log(one)) if one > 0 else -np.inf for one in clip)
            bounds = (low, low), (high, high)
        return cls(frame, own, theirs, bounds, spacing, log_probs)

    def admitted(self, tokens: NDArray[np.int64], bound: float) -> Bools:
        """Return which tokens have the value of the other branch, and may have taken it.

        Args:
            tokens: numbers in the frame of tokens whose gradients differ.
            bound: tolerance of a gradient.
        """
        golden, actual = self.golden.gradient[tokens], self.actual.gradient[tokens]
        per_ratio = self._per_ratio(bound)[tokens]
        least = NOTHING * float(np.nanmax(np.abs(self.golden.gradient), initial=0.0))
        clipped = np.abs(golden) > least  # on the actual side, then: the golden side has not clipped it
        sign = np.where(clipped, golden, per_ratio)
        other = np.where(clipped, 0.0, per_ratio * np.exp(self.actual.log_ratio[tokens]))
        with np.errstate(invalid="ignore"):
            right = np.abs(actual - other) <= bound
            right &= ~clipped | (np.abs(actual) <= max(least, self.spacing * bound))
        return np.asarray(right & self._at_bound(tokens, sign), bool)

    def taken(self, rows: TokenRows, frame: TokenFrame, bound: float) -> Taken | None:
        """Return the tokens of a record that took the other branch, and may have; None if there are none.

        Args:
            frame: numbers the tokens of the rows.
            bound: tolerance of a gradient.
        """
        at, expected, tokens = self._beside(rows, frame)
        values = rows.part.array.reshape(-1)
        differ = (np.abs(values[at] - expected) > bound) | _on_one_side(expected, values[at])
        over = np.flatnonzero(differ & (tokens >= 0))
        chosen = over[self.admitted(tokens[over], bound)]
        if not chosen.size:
            return None
        closer = values.copy()
        closer[at[chosen]] = expected[chosen].astype(closer.dtype)
        part = replace(rows.part, array=closer.reshape(rows.part.array.shape))
        return Taken(replace(rows, part=part), chosen.size, self._share(tokens[chosen]))

    def wrong(self, rows: TokenRows, frame: TokenFrame) -> TokenRows | None:
        """Return the tokens of a record that another clip range stops or lets through; None if there are none.

        However coarse the dtype, a token is clipped or is not: away from the bound, a gradient that is 0 on one side
        only is not rounding. Tokens that a mask may have stopped are left out.
        """
        at, _, tokens = self._beside(rows, frame)
        known = np.flatnonzero(tokens >= 0)
        here = tokens[known]
        golden, actual = self.golden.gradient, self.actual.gradient
        least = NOTHING * float(np.nanmax(np.abs(golden), initial=0.0))
        coarse = 4 * self.spacing * float(np.nanmax(np.abs(golden), initial=0.0))
        found = np.zeros(here.size, bool)
        # gradients that are gone from a whole sample are clipped if they were those of one advantage, not of a KL
        clipping = (
            self._turned(actual, 1, least)
            | self._turned(actual, -1, least)
            | np.isfinite(self._per_ratio(coarse))
        )
        for sign, (start, end) in zip((-1, 1), self.bounds, strict=True):
            own, theirs = sign * self.golden.log_ratio, sign * self.actual.log_ratio
            first, last = sorted((sign * start, sign * end))
            rounded = 0.5 * self.spacing * self.golden.size
            turned = self._turned(golden, sign, least)
            with np.errstate(invalid="ignore"):
                free = turned & (-sign * actual > coarse)
                furthest = float(theirs[free].max(initial=-np.inf))
                let = turned & (np.abs(golden) <= least) & (-sign * actual > coarse)
                let &= np.minimum(own, theirs) - rounded > last
                stopped = (
                    turned & clipping & (-sign * golden > coarse) & (np.abs(actual) <= least) & (own > 0)
                )
                stopped &= (np.maximum(own, theirs) + rounded < first) & (theirs >= furthest)
            found |= (let | stopped)[here]
        return replace(rows, selected=at[known[found]]) if found.any() else None

    def _turned(self, gradient: Floats, sign: int, least: float) -> Bools:
        """Return the tokens of samples whose advantage has a sign, as the gradients of some of its tokens tell."""
        speaking = np.nan_to_num(-sign * gradient) > least
        return np.repeat(np.maximum.reduceat(speaking, self.frame.offsets[:-1]), self.frame.lengths)

    def _beside(
        self, rows: TokenRows, frame: TokenFrame
    ) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
        """Return local place, golden value and number (-1 for none) of the tokens of a record that count."""
        places, golden = [np.zeros(0, np.int64)], [np.zeros(0)]
        for block in rows.blocks():
            at = block.places
            places.append(np.arange(at.start, at.stop) if isinstance(at, slice) else at)
            golden.append(block.golden.reshape(-1).astype(np.float64))
        found = np.concatenate(places)
        return found, np.concatenate(golden), numbers(rows.part.rows[found], frame, self.frame)

    def _share(self, tokens: NDArray[np.int64]) -> float:
        """Return the part of the token gradients' norm that some tokens make up when they take the other branch."""
        change = (self.actual.gradient - self.golden.gradient)[tokens]
        whole = float(np.sqrt(np.nansum(self.golden.gradient**2)))
        return float(np.sqrt((change**2).sum())) / whole if whole else np.inf

    def _at_bound(self, tokens: NDArray[np.int64], sign: Floats) -> Bools:
        """Return which tokens have a bound within their rounding: the upper one if their gradient is negative."""
        ratios = np.stack([self.golden.log_ratio[tokens], self.actual.log_ratio[tokens]])
        rounded = 0.5 * self.spacing * self.golden.size[tokens]
        largest = float(np.nanmax(self.golden.size, initial=0.0))
        alike = np.ptp(ratios, axis=0) <= self.log_probs.absolute + self.log_probs.relative * largest
        first, last = ratios.min(axis=0) - rounded, ratios.max(axis=0) + rounded
        (low, low_end), (high, high_end) = self.bounds
        start, end = np.where(sign > 0, low, high), np.where(sign > 0, low_end, high_end)
        with np.errstate(invalid="ignore"):
            near = (first <= end) & (start <= last) & (end - start <= last - first)
        return np.asarray(alike & near, bool)

    def _per_ratio(self, bound: float) -> Floats:
        """Return the gradient of each token over its ratio, as its sample has it; NaN where tokens disagree."""
        found = np.full(self.frame.size, np.nan)
        gradient, ratio = self.golden.gradient, np.exp(self.golden.log_ratio)
        least = NOTHING * float(np.nanmax(np.abs(gradient), initial=0.0))
        for start, stop in zip(self.frame.offsets[:-1], self.frame.offsets[1:], strict=True):
            own = slice(start, stop)
            speaking = (np.abs(gradient[own]) > least) & np.isfinite(ratio[own])
            if not speaking.any():
                continue
            every = gradient[own][speaking] / ratio[own][speaking]
            middle = float(np.median(every))
            if (np.abs(every - middle) * ratio[own][speaking] <= bound).all():
                found[own] = middle
        return found


def jumps(rows: TokenRows) -> bool:
    """Return True if a token has a gradient on one side only."""
    return any(
        _on_one_side(block.golden.reshape(-1), block.actual.reshape(-1)).any() for block in rows.blocks()
    )


def _on_one_side(golden: NDArray[Any], actual: NDArray[Any]) -> Bools:
    """Return which tokens have a gradient on one side only, however large the tolerance."""
    own, theirs = np.abs(golden.astype(np.float64)), np.abs(actual.astype(np.float64))
    largest = max(float(own.max(initial=0.0)), float(theirs.max(initial=0.0)))
    less, more = np.minimum(own, theirs), np.maximum(own, theirs)
    return np.asarray((less <= NOTHING * largest) & (more > SOMETHING * largest), bool)


@dataclass(frozen=True)
class ClipBoundary:
    """Token gradients, where tokens at a bound of the clip range may take either branch."""

    work: UnitWork

    def admit(self, source: QuantitySource, finding: Finding, found: Aligned) -> Finding:
        """Return the finding with tokens that took the other branch, and may have, counted as equal."""
        unit, rows, verdict = self.work.unit, found.tokens, finding.verdict
        if rows is None or not self.work.by_table or not (verdict.status is Status.DRIFT or jumps(rows)):
            return finding
        dtype, judged = self.work.dtype(found.actual, found.golden), partial(self.work.judged, source)
        return _branched(unit, finding, found, rows, dtype, judged)


def _branched(
    unit: Unit, finding: Finding, found: Aligned, rows: TokenRows, dtype: str, judged: Judged
) -> Finding:
    """Return the finding of `ClipBoundary`.

    Args:
        dtype: the coarsest of the two sides.
        judged: judges the tensor anew.
    """
    verdict, paths = finding.verdict, (unit.golden, unit.actual)
    sides = []
    for (one, other), record in ((paths, unit.records[0]), (paths[::-1], unit.record)):
        sides.append((golden_update(one, other, record), partial(earlier_updates, one, other, record)))
    config = merged(open_side(unit.actual).config, open_side(unit.golden).config)
    log_probs = unit.bounds.of("log_probs", [dtype])
    branches = Branches.of(sides[0], sides[1], unit.golden_of, config, spacing(dtype), log_probs)
    if branches is None:
        return finding
    wrong = branches.wrong(rows, unit.frame)
    if wrong is not None:
        none = Tolerance(0.0, branches.spacing * finding.verdict.scale, reason=CLIPPED)
        return judged(found.among(wrong), none)
    taken = branches.taken(rows, unit.frame, verdict.tolerance)
    if taken is None:
        return finding
    closer = taken.rows.part.array.reshape(found.actual.shape)
    anew = judged(replace(found.among(taken.rows), actual=closer))
    return replace(anew, note=taken.note(unit.place), carried=taken.count, share=taken.share)


def _seen(side: Side, frame: TokenFrame, sign: int) -> tuple[float, float]:
    """Return the interval that holds the logarithm of a bound, between clipped tokens and others.

    Args:
        sign: 1 for the upper bound, which clips samples of positive advantage; -1 for the lower one.
    """
    unknown = (-np.inf, np.inf)
    loss = np.isfinite(side.log_ratio) & np.isfinite(side.gradient)
    away = sign * side.log_ratio
    least = NOTHING * float(np.abs(side.gradient[loss]).max(initial=0.0))
    speaking = loss & (-sign * side.gradient > least)
    free = speaking & (away > 0)
    turned = np.repeat(np.maximum.reduceat(speaking, frame.offsets[:-1]), frame.lengths)
    stopped = loss & turned & (np.abs(side.gradient) <= least) & (away > 0)
    if not free.any() or not stopped.any():
        return unknown
    inside = float(away[free].max())
    beyond = away[stopped & (away > inside)]
    if not beyond.size:
        return unknown
    first, last = sorted((sign * inside, sign * float(beyond.min())))
    return first, last


def _first(frame: TokenFrame, earlier: Iterable[Projection]) -> Floats | None:
    """Return the log-probs of the first update with each sample; None where there is none for any."""
    found = np.full(frame.size, np.nan)
    for update in earlier:
        values, index = _flat(update, "log_probs"), update.frame.index
        if values is None:
            continue
        for number, key in enumerate(frame.samples):
            own = index.get(key)
            here = slice(*frame.offsets[number : number + 2])
            if (
                own is not None
                and update.frame.lengths[own] == frame.lengths[number]
                and np.isnan(found[here]).all()
            ):
                found[here] = values[slice(*update.frame.offsets[own : own + 2])]
    return None if np.isnan(found).all() else found


def _flat(known: Projection, quantity: str) -> Floats | None:
    """Return a quantity of each token of an update; None unless it is there."""
    values = known.truth.get(quantity, {}).get(quantity)
    if values is None or values.shape != (known.frame.size,):
        return None
    return values.astype(np.float64)
