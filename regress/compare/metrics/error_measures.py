"""Measures of a pair of arrays, and how those of parts combine to those of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class RowNorms:
    """A row with the Euclidean norms of its finite errors and golden values."""

    index: int
    error_l2: float
    golden_l2: float


@dataclass(frozen=True)
class Measures:
    """Measures of two arrays of equal shape, with elements counted in C order.

    All but the counts of mismatched elements cover pairs that are finite on both sides; an error is the absolute value
    of ``actual - golden`` unless stated otherwise.

    Attributes:
        count: elements compared; ``finite`` those that are finite on both sides.
        over: elements whose error exceeds the bound, or, asked for bytes, whose bytes differ.
        max_error: largest error; ``worst`` is the first element with it (or, if all errors are 0, the first whose
            bytes differ), None where nothing differs.
        error_l2, golden_l2: Euclidean norms of the errors and of the golden values.
        mismatched: elements that are not finite on one side only, or not in the same way on both sides;
            ``first_mismatch`` is the first of them.
        error_sum: sum of the signed errors.
        product: inner product of the signed errors and the golden values.
        max_relative: largest error over its golden value; infinite for an error where the golden value is 0.
        max_ulp: largest distance in ulps of the actual dtype, see `regress.compare.metrics.ulps`; None for other
            than floats.
        octaves: exponent ``k`` -> number of errors in ``[2**(k-1), 2**k)``; the others are 0 or subnormal
            numbers of float64.
        worst_row: the row whose error has the largest norm, if there were rows and something differs.
    """

    count: int = 0
    over: int = 0
    max_error: float = 0.0
    worst: int | None = None
    error_l2: float = 0.0
    golden_l2: float = 0.0
    mismatched: int = 0
    first_mismatch: int | None = None
    finite: int = 0
    error_sum: float = 0.0
    product: float = 0.0
    max_relative: float = 0.0
    max_ulp: float | None = None
    octaves: Mapping[int, int] = field(default_factory=dict)
    worst_row: RowNorms | None = None

    @property
    def relative_l2(self) -> float:
        """``error_l2 / golden_l2``; infinite for an error where the golden array is zero."""
        return ratio(self.error_l2, self.golden_l2)

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return self.error_l2 / math.sqrt(self.finite) if self.finite else 0.0

    @property
    def mean_error(self) -> float:
        """Mean of the signed errors: what is left of them where noise cancels."""
        return self.error_sum / self.finite if self.finite else 0.0

    @property
    def alpha(self) -> float | None:
        """The factor ``<T, R> / <R, R>`` by which the golden values come closest to the actual ones.

        It is None where it has no meaning: the golden values are zero, or their squares leave the range of float64.
        """
        excess = self._excess()
        return None if excess is None else 1.0 + excess

    @property
    def residual(self) -> float | None:
        """``||T - alpha R|| / ||R||``, what scaling does not explain.

        It is the difference of two sums, so values below 1e-6 of ``relative_l2`` are noise;
        see `scaled_residual`.
        """
        excess = self._excess()
        if excess is None:
            return None
        return math.sqrt(max((self.relative_l2 - abs(excess)) * (self.relative_l2 + abs(excess)), 0.0))

    @property
    def quantiles(self) -> dict[str, float]:
        """Upper bounds of quantiles of the error, a factor of two above them at most."""
        if not self.octaves:
            return dict.fromkeys(QUANTILES, 0.0)
        found: dict[str, float] = {}
        below, bound = self.finite - sum(self.octaves.values()), 0.0
        octaves = iter(sorted(self.octaves.items()))
        for name, share in QUANTILES.items():
            while below < share * self.finite:
                exponent, count = next(octaves)
                below += count
                bound = min(math.ldexp(1.0, exponent) if exponent < 1024 else math.inf, self.max_error)
            found[name] = bound
        return found

    def _excess(self) -> float | None:
        square = self.golden_l2 * self.golden_l2
        excess = self.product / square if 0.0 < square < math.inf else math.nan
        return excess if math.isfinite(excess) else None

    def then(self, other: Measures, rows: int = 0) -> Measures:
        """Return these measures combined with those of the elements that follow after so many whole rows."""
        if not self.count:
            return other
        first = self.worst is not None and (other.worst is None or self.max_error >= other.max_error)
        following = other.worst_row and replace(other.worst_row, index=other.worst_row.index + rows)
        return Measures(
            count=self.count + other.count,
            over=self.over + other.over,
            max_error=max(self.max_error, other.max_error),
            worst=self.worst if first else _shifted(other.worst, self.count),
            error_l2=math.hypot(self.error_l2, other.error_l2),
            golden_l2=math.hypot(self.golden_l2, other.golden_l2),
            mismatched=self.mismatched + other.mismatched,
            first_mismatch=_shifted(other.first_mismatch, self.count)
            if self.first_mismatch is None
            else self.first_mismatch,
            finite=self.finite + other.finite,
            error_sum=self.error_sum + other.error_sum,
            product=self.product + other.product,
            max_relative=max(self.max_relative, other.max_relative),
            max_ulp=_larger(self.max_ulp, other.max_ulp),
            octaves=_together(self.octaves, other.octaves),
            worst_row=_worse(self.worst_row, following),
        )


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``: 0 for 0 / 0, infinite for any other division by 0."""
    if math.isinf(whole):
        return 0.0
    return part / whole if whole else math.inf if part else 0.0


def _shifted(index: int | None, by: int) -> int | None:
    return None if index is None else index + by


def _larger(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)


def _worse(a: RowNorms | None, b: RowNorms | None) -> RowNorms | None:
    return a if b is None or (a is not None and a.error_l2 >= b.error_l2) else b


def _together(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
