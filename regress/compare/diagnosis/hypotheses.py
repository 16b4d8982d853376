"""Values that would explain wrong ones, and the test of whether they do.

A hypothesis is an array beside the golden one. `explains` tests whether the affected values equal it in too many places
for chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.ulps import spacing
from regress.dump.numpy_arrays import Array, is_float

if TYPE_CHECKING:
    from regress.compare.diagnosis.counterfactuals import Counterfactual

Truth = Mapping[str, Mapping[str, Array]]
"""``quantity -> tensor name -> canonical values`` of one update."""
Floats = NDArray[np.float64]

CHANCE = 1e-6
"""Largest probability that chance makes values equal to those of a hypothesis."""
_CHANGES = 1000
"""Changes of a formula that may be tried on one tensor: any of them has to be as improbable as one hypothesis."""
_AT_LEAST = 2
_ZERO = 1e-12
"""Largest multiple of a direction that is none, but rounding."""
_SAME = 1e-9
"""Largest difference, relative to the value, at which two formulas say the same of an element."""
LEFT = 1e-3
"""Largest part of an error that a formula or factor may leave if it is to explain it."""


@dataclass(frozen=True)
class Hypothesis:
    """Values that would explain the recorded ones.

    Attributes:
        id: id of the pattern, such as ``"equals"``.
        numbers: further numbers of the pattern.
        values: in the shape of the golden tensor, NaN where it says nothing.
        direction: array of that shape, if a multiple of it is to be added; the multiple is the number ``value``.
        partial: True if it may say nothing of most of the affected values.
        rows: ``[n]`` the rows of the tensor, its leading dimensions flat, that ``values`` are of; None for all.
        whole: returns the same hypothesis about all rows, which is to be asked where these are explained.
    """

    id: str
    values: Floats
    numbers: Mapping[str, Any] = field(default_factory=dict)
    direction: Floats | None = None
    partial: bool = False
    rows: NDArray[np.int64] | None = None
    whole: Callable[[], Hypothesis | None] = lambda: None

    def at(self, place: NDArray[np.int64], finish: Callable[[Hypothesis], Hypothesis]) -> Hypothesis:
        """Return the hypothesis about rows that lie elsewhere; ``place`` is -1 for those that are not there."""
        rows = place[self.rows]
        there = rows >= 0

        def whole() -> Hypothesis | None:
            found = self.whole()
            return None if found is None else finish(found)

        return replace(self, values=self.values[there], rows=rows[there], whole=whole)


def changed(found: Counterfactual, values: Floats) -> Hypothesis:
    """Return what a counterfactual says of a tensor, whose places its values were put to."""
    said = {"what": f"that {found.words}", "id": found.id, "change": int(found.change)}
    return Hypothesis("formula", values, said)


def without_unchanged(guess: Hypothesis, plain: Floats | None) -> Hypothesis:
    """Return a hypothesis that says nothing of the values that it leaves as they are.

    Args:
        plain: what the objective makes of them, in the shape of the tensor; None where it is unknown.
    """
    if plain is None or guess.direction is not None or guess.values.shape != plain.shape:
        return guess
    same = np.isclose(guess.values, plain, rtol=_SAME, atol=0.0)
    return replace(guess, values=np.where(same, np.nan, guess.values))


def fitted(guess: Hypothesis, actual: Array, over: NDArray[np.bool_]) -> Hypothesis:
    """Return the hypothesis with the multiple of its direction that comes closest to the affected values."""
    if guess.direction is None:
        return guess
    said = over & np.isfinite(guess.values) & np.isfinite(guess.direction)
    along = guess.direction[said]
    square = float((along**2).sum())
    if int(said.sum()) < 3 or not square:
        return replace(guess, values=np.full(guess.values.shape, np.nan), direction=None)
    value = float(((actual[said].astype(np.float64) - guess.values[said]) * along).sum()) / square
    value = value if abs(value) > _ZERO else 0.0
    numbers = {**guess.numbers, "value": float(f"{value:.6g}")}
    return Hypothesis(guess.id, guess.values + value * guess.direction, numbers)


def explains(
    guess: Hypothesis,
    actual: Array,
    golden: Array,
    over: NDArray[np.bool_],
    bound: float,
    compared: NDArray[np.bool_] | None = None,
) -> bool:
    """Return True if the affected values equal those of the hypothesis in too many places for chance.

    Chance is the probability that as many random values, spread like the golden tensor, fall within the bound. Where
    the hypothesis says something of values that hold, it must be right about them, too. One whole number or
    mask is enough here, and proves nothing: those of all tensors are counted where patterns are found.

    Args:
        compared: elements that count, in the shape of the tensor; None for all.
    """
    said = over & np.isfinite(guess.values)
    hits = int(said.sum())
    exact = not is_float(golden.dtype)
    if hits < (1 if exact else _AT_LEAST) or (hits < 0.5 * int(over.sum()) and not guess.partial):
        return False
    values = guess.values[said]
    slack = 0.0 if exact else max(bound, _rounding(actual, values))
    if _contradicted(guess, actual, slack, compared):
        return False
    moved = np.abs(values - golden[said].astype(np.float64))
    if float(np.median(moved)) <= 4 * slack:
        return False  # it equals the golden tensor
    if not exact and not leaves_little(actual[said], golden[said], values):
        return False
    if exact:
        return True
    room = float(np.ptp(np.concatenate([values, golden[said].astype(np.float64)])))
    chance = min(2 * slack / room, 1.0) if room else 1.0
    tried = _CHANGES if "change" in guess.numbers else 1
    return hits * math.log(max(chance, 1e-300)) < math.log(CHANCE / tried)


def says_nothing(
    guess: Hypothesis,
    actual: Array,
    over: NDArray[np.bool_],
    bound: float,
    compared: NDArray[np.bool_] | None = None,
) -> bool:
    """Return True for a partial hypothesis that knows too few of the affected values, and is right about all others."""
    known = guess.values[np.isfinite(guess.values)]
    if not guess.partial or not known.size or int((over & np.isfinite(guess.values)).sum()) >= _AT_LEAST:
        return False
    return not _contradicted(guess, actual, max(bound, _rounding(actual, known)), compared)


def _contradicted(guess: Hypothesis, actual: Array, slack: float, compared: NDArray[np.bool_] | None) -> bool:
    """Return True if a value that counts differs from that of the hypothesis."""
    asked = np.isfinite(guess.values)
    asked = asked if compared is None else asked & compared
    with np.errstate(invalid="ignore"):
        return not (np.abs(actual[asked].astype(np.float64) - guess.values[asked]) <= slack).all()


def leaves_little(actual: Array, golden: Array, values: Floats) -> bool:
    """Return True if values leave at most `LEFT` of the error of the actual ones, in norm."""
    found = actual.astype(np.float64)
    error = float(np.linalg.norm(found - golden.astype(np.float64)))
    return float(np.linalg.norm(found - values)) <= LEFT * error


def permuted(actual: Array, golden: Array, pool: Floats, over: NDArray[np.bool_], bound: float) -> bool:
    """Return True if every affected value, of at least five different ones, is the golden value of another token.

    Args:
        pool: the different golden values, sorted.
    """
    if not is_float(golden.dtype):
        return False
    found = actual[over].astype(np.float64)
    values = pool[np.isfinite(pool)]
    if not np.isfinite(found).all() or np.unique(found).size < 5 or values.size < 5:
        return False
    slack = max(bound, _rounding(actual, values))
    place = np.clip(np.searchsorted(values, found), 1, values.size - 1)
    nearest = np.minimum(np.abs(found - values[place]), np.abs(found - values[place - 1]))
    if not (nearest <= slack).all():
        return False
    chance = min(2 * slack * values.size / max(float(np.ptp(values)), 1e-300), 1.0)
    return np.unique(found).size * math.log(max(chance, 1e-300)) < math.log(CHANCE)


def _rounding(actual: Array, values: Floats) -> float:
    return 16 * spacing(actual.dtype) * float(np.abs(values).max(initial=0.0))
