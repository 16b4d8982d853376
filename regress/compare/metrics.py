"""Measures of a pair of arrays, chunk by chunk: no full copy in float64 is ever made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.ulps import most_ulps
from regress.dump.arrays import Array, is_float

CHUNK = 1 << 13
"""Elements looked at together: their float64 copies stay in a processor's cache, and one thread adds them up."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Row:
    """A row, and the Euclidean norms of its finite errors and golden values."""

    index: int
    error_l2: float
    golden_l2: float


@dataclass(frozen=True)
class Measures:
    """What was measured of two arrays of equal shape, with elements counted in C order.

    Everything but the counts of mismatched elements is of pairs that are finite on both sides; an error is
    ``actual - golden``, without its sign unless something else is said.

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
        max_ulp: largest distance in ulps of the actual dtype, see `regress.compare.ulps`; None for other than floats.
        octaves: exponent ``k`` -> number of errors in ``[2**(k-1), 2**k)``; the others are 0.
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
    worst_row: Row | None = None

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

        None where it has no meaning: the golden values are zero, or their squares leave the range of float64.
        """
        excess = self._excess()
        return None if excess is None else 1.0 + excess

    @property
    def residual(self) -> float | None:
        """``||T - alpha R|| / ||R||``, what scaling does not explain.

        It comes from the difference of two sums, so what is below 1e-6 of ``relative_l2`` is noise;
        see `scaled_residual`.
        """
        excess = self._excess()
        if excess is None:
            return None
        return math.sqrt(max((self.relative_l2 - abs(excess)) * (self.relative_l2 + abs(excess)), 0.0))

    @property
    def quantiles(self) -> dict[str, float]:
        """Upper bounds of quantiles of the error, a factor of two above them at most."""
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
        """These measures and those of the elements that follow, before which there are so many whole rows."""
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


def measure(
    actual: Array, golden: Array, bound: float = 0.0, *, bitwise: bool = False, row: int | None = None
) -> Measures:
    """Compare two arrays of equal shape, of any dtypes a dump can hold.

    Args:
        bound: errors above it are counted in ``over``; integers and booleans are compared exactly.
        bitwise: count the elements whose bytes differ instead (both arrays then have the same dtype).
        row: elements of a row, which divides their number; None for no rows.
    """
    found = Measures()
    floats = is_float(actual.dtype) or is_float(golden.dtype)
    rows = 0
    with np.errstate(all="ignore"):  # not-a-numbers and overflows are what is looked for
        for a, g in _chunks(row, actual, golden):
            part = _floats(a, g, bound, row) if floats else _exact(a, g, row)
            found = found.then(_with_bytes(part, a, g) if bitwise else part, rows)
            rows += a.size // row if row else 0
    return found


def scaled_residual(actual: Array, golden: Array, alpha: float) -> float:
    """``||actual - alpha golden|| / ||golden||`` over pairs that are finite, to the last digits of float64."""
    error = norm = 0.0
    with np.errstate(all="ignore"):
        for a, g in _chunks(None, actual, golden):
            x, y = a.astype(np.float64), g.astype(np.float64)
            finite = np.isfinite(x) & np.isfinite(y)
            error = math.hypot(error, _norm(np.where(finite, x - alpha * y, 0.0)))
            norm = math.hypot(norm, _norm(np.where(finite, y, 0.0)))
    return ratio(error, norm)


def largest(array: Array) -> float:
    """Largest finite absolute value, 0.0 where there is none."""
    found = 0.0
    with np.errstate(all="ignore"):
        for (part,) in _chunks(None, array):
            wide = np.abs(part.astype(np.float64, copy=False))
            top = float(np.maximum.reduce(wide))
            if not math.isfinite(top):
                top = float(np.max(wide, initial=0.0, where=np.isfinite(wide)))
            found = max(found, top)
    return found


def nonfinite(array: Array) -> NDArray[np.bool_]:
    """Where an array holds NaN or infinity, in its shape."""
    if not is_float(array.dtype):
        return np.zeros(array.shape, bool)
    with np.errstate(all="ignore"):
        return np.logical_not(np.isfinite(array))


def ratio(part: float, whole: float) -> float:
    """``part / whole``, where nothing out of nothing is 0 and something out of nothing is infinite."""
    if math.isinf(whole):
        return 0.0
    return part / whole if whole else math.inf if part else 0.0


def _chunks(row: int | None, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Parts of all arrays, of whole rows each."""
    flat = [array.reshape(-1) for array in arrays]
    step = CHUNK if not row else max(CHUNK // row, 1) * row
    for start in range(0, flat[0].size, step):
        yield tuple(array[start : start + step] for array in flat)


def _floats(a: Array, g: Array, bound: float, row: int | None) -> Measures:
    x, y = a.astype(np.float64, copy=False), g.astype(np.float64, copy=False)
    signed = x - y
    square = float(np.dot(signed, signed))
    counted, mismatched, first = a.size, 0, None
    if not math.isfinite(square):  # as soon as one of them is not
        finite = np.isfinite(x) & np.isfinite(y)
        other = ~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))
        counted, mismatched = int(finite.sum()), int(other.sum())
        first = int(other.argmax()) if mismatched else None
        signed, y = np.where(finite, signed, 0.0), np.where(finite, y, 0.0)
    error = np.abs(signed)
    worst = int(error.argmax())
    highest = float(error[worst])
    max_ulp = 0.0 if counted and is_float(a.dtype) else None
    if not highest:
        return Measures(a.size, 0, 0.0, None, 0.0, _norm(y), mismatched, first, counted, max_ulp=max_ulp)
    size = np.abs(y)
    return Measures(
        count=a.size,
        over=int(np.count_nonzero(error > bound)) if highest > bound else 0,
        max_error=highest,
        worst=worst,
        error_l2=_norm(error),
        golden_l2=_norm(y),
        mismatched=mismatched,
        first_mismatch=first,
        finite=counted,
        error_sum=float(np.add.reduce(signed)),
        product=float(np.dot(signed, y)),
        max_relative=float(np.fmax.reduce(error / size)),
        max_ulp=None if max_ulp is None else most_ulps(a, g, error, size),
        octaves=_octaves(error),
        worst_row=_worst_row(error, y, row),
    )


def _exact(a: Array, g: Array, row: int | None) -> Measures:
    """Integers differ exactly; how far the worst is off is then known to 53 bits."""
    differing = np.flatnonzero(a != g)
    golden = g.astype(np.float64)
    found = Measures(a.size, golden_l2=_norm(golden), finite=a.size)
    if not differing.size:
        return found
    # neighbours beyond 2**53 are one number in float64, so they are subtracted as integers, modulo 2**64
    above, x, y = a > g, a.astype(np.uint64), g.astype(np.uint64)
    error = np.where(above, x - y, y - x).astype(np.float64)
    signed = np.where(above, error, -error)
    worst = int(error.argmax())
    off = float(abs(int(a[worst]) - int(g[worst])))
    return replace(
        found,
        over=differing.size,
        max_error=off,
        worst=worst,
        error_l2=_norm(error),
        error_sum=float(signed.sum()),
        product=float(np.dot(signed, golden)),
        max_relative=float(np.fmax.reduce(error / np.abs(golden))),
        octaves=_octaves(error),
        worst_row=_worst_row(error, golden, row),
    )


def _with_bytes(part: Measures, a: Array, g: Array) -> Measures:
    width = a.dtype.itemsize
    x, y = (np.ascontiguousarray(array).view(np.uint8).reshape(-1, width) for array in (a, g))
    differing = np.flatnonzero((x != y).any(axis=1))
    worst = part.worst if part.worst is not None or not differing.size else int(differing[0])
    return replace(part, over=differing.size, worst=worst)


def _octaves(error: NDArray[np.float64]) -> dict[int, int]:
    """Numbers of errors that are not 0, by binary exponent; subnormal numbers are of the lowest."""
    exponents = error.view(np.int64) >> 52
    lowest = int(np.minimum.reduce(exponents))
    exponents -= lowest
    counts = np.bincount(exponents).tolist()
    if not lowest:  # there are zeros, whose exponent is that of subnormal numbers
        counts[0] -= error.size - int(np.count_nonzero(error))
    return {lowest - 1022 + i: count for i, count in enumerate(counts) if count}


def _worst_row(error: NDArray[np.float64], golden: NDArray[np.float64], row: int | None) -> Row | None:
    if not row:
        return None
    rows = error.reshape(-1, row)
    index = int(np.einsum("ij,ij->i", rows, rows).argmax())
    return Row(index, _norm(rows[index]), _norm(golden.reshape(-1, row)[index]))


def _norm(values: NDArray[np.float64]) -> float:
    """Euclidean norm, scaled only where squares would leave the range of float64."""
    norm = math.sqrt(float(np.dot(values, values)))
    if 1e-140 < norm < math.inf:
        return norm
    top = float(np.max(np.abs(values), initial=0.0))
    if top == 0.0 or math.isinf(top):
        return top
    units = values / top
    return top * math.sqrt(float(np.dot(units, units)))


def _shifted(index: int | None, by: int) -> int | None:
    return None if index is None else index + by


def _larger(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)


def _worse(a: Row | None, b: Row | None) -> Row | None:
    return a if b is None or (a is not None and a.error_l2 >= b.error_l2) else b


def _together(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
