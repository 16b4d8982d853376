"""Sums of known parts: a wrong tensor is decomposed into them, and the parts that count wrongly are named.

Many elements determine few coefficients, so a fit that leaves next to nothing of the error is a proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import LEFT, Floats
from regress.dump.numpy_arrays import Array

AT_LEAST = 8
"""Fewest elements that determine the coefficients of a sum."""
_SPARE = 4
"""Fewest elements beyond the number of coefficients: each that fits leaves a thousandth of a chance to accident."""
_CONDITION = 1e7
"""Largest condition number of the parts, each of norm 1: beyond it some are the same but for a factor."""
_SAME = 1e-4
"""Relative error up to which a coefficient is the expected one."""
ROUNDED = 1e-5


@dataclass(frozen=True)
class Term:
    """A part of a sum.

    Attributes:
        name: as in a sentence, such as ``"the KL term"``.
        values: array in the shape of the tensor, NaN where nothing is known.
        count: expected coefficient; ratios to it are reported where it is not 0.
    """

    name: str
    values: Floats
    count: float = 1.0


@dataclass(frozen=True)
class Terms:
    """A tensor as a sum of parts.

    Attributes:
        id: id of the pattern that tells the parts that count wrongly.
        terms: the parts; with the expected coefficients they add up to the golden tensor.
        most: most parts that may be wrong at once: no single fault explains more.
    """

    id: str
    terms: Sequence[Term]
    most: int = 2
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def counts(
        self, actual: Array, golden: Array, mask: NDArray[np.bool_], bound: float
    ) -> dict[str, float] | None:
        """Return by name how often each part that counts wrongly counts; None unless that explains the tensor.

        Args:
            where: elements that are compared.
            bound: tolerance of an element.
        """
        known = mask & np.isfinite(golden)
        for term in self.terms:
            known &= np.isfinite(term.values)
        if int(known.sum()) < max(AT_LEAST, len(self.terms) + _SPARE) or not self.terms:
            return None
        found, right = actual[known].astype(np.float64), golden[known].astype(np.float64)
        parts = np.stack([term.values[known].astype(np.float64) for term in self.terms], axis=1)
        if not np.isfinite(found).all() or not self._adds_up(parts, right):
            return None
        error = float(np.linalg.norm(found - right))
        for chosen in self._subsets(parts, found - right):
            change = _solved(parts[:, chosen], found - right)
            if change is None:
                continue
            left = float(np.linalg.norm(found - right - parts[:, chosen] @ change))
            if left > LEFT * error:
                continue
            factors = {
                self.terms[i].name: self._count(i, float(c)) for i, c in zip(chosen, change, strict=True)
            }
            wrong = {name: count for name, count in factors.items() if abs(count - 1.0) > _SAME}
            if not 0 < len(wrong) <= self.most or self._factor(parts, wrong):
                return None
            return wrong
        return None

    def _factor(self, parts: Floats, wrong: Mapping[str, float]) -> bool:
        """Return True if all parts count equally, which a factor says without them."""
        there = [term.name for i, term in enumerate(self.terms) if parts[:, i].any() and term.count]
        first = next(iter(wrong.values()))
        return {*wrong} == {*there} and all(abs(c - first) <= _SAME * abs(first) for c in wrong.values())

    def _adds_up(self, parts: Floats, golden: Floats) -> bool:
        """Return True if the parts are those of the golden values."""
        total = parts @ np.array([term.count for term in self.terms])
        size = float(np.linalg.norm(golden))
        return float(np.linalg.norm(total - golden)) <= 1e-6 * max(size, 1e-300)

    def _subsets(self, parts: Floats, error: Floats) -> list[list[int]]:
        """Return sets of parts to try: each alone, the likeliest first, and then all of them."""
        there = [i for i in range(len(self.terms)) if parts[:, i].any()]
        ranked = sorted(there, key=lambda i: _unexplained(parts[:, i], error))
        return [*([i] for i in ranked), *([there] if len(there) > 1 else [])]

    def _count(self, index: int, change: float) -> float:
        expected = self.terms[index].count
        ratio = 1.0 + change / expected if expected else 1.0 + change
        return float(f"{ratio:.5g}") if abs(ratio) > ROUNDED else 0.0


def _unexplained(part: Floats, error: Floats) -> float:
    along = float(part @ error) / float(part @ part)
    return float(np.linalg.norm(error - along * part))


def _solved(parts: Floats, values: Floats) -> Floats | None:
    """Return the coefficients of the least squares solution; None where the parts do not determine them."""
    norms = np.linalg.norm(parts, axis=0)
    if not norms.all():
        return None
    unit = parts / norms
    if len(norms) > 1 and np.linalg.cond(unit) > _CONDITION:
        return None
    found: Floats = np.linalg.lstsq(unit, values, rcond=None)[0] / norms
    return found
