"""Measures of a pair of arrays, chunk by chunk: no full copy in float64 is ever made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from regress.dump.arrays import Array, is_float

CHUNK = 1 << 16
"""Elements looked at together: their float64 copies stay in a processor's cache."""


@dataclass(frozen=True)
class Measures:
    """What was measured of two arrays of equal shape, with elements counted in C order.

    Attributes:
        count: elements compared.
        over: elements whose error exceeds the bound, or, asked for bytes, whose bytes differ.
        max_error: largest error between finite elements; ``worst`` is the first element with it (or, if all errors
            are 0, the first whose bytes differ), None where nothing differs.
        error_l2, golden_l2: Euclidean norms of the finite errors and of the finite golden values.
        mismatched: elements that are not finite on one side only, or not in the same way on both sides;
            ``first_mismatch`` is the first of them.
    """

    count: int = 0
    over: int = 0
    max_error: float = 0.0
    worst: int | None = None
    error_l2: float = 0.0
    golden_l2: float = 0.0
    mismatched: int = 0
    first_mismatch: int | None = None

    @property
    def relative_l2(self) -> float:
        """``error_l2 / golden_l2``; infinite for an error where the golden array is zero."""
        return ratio(self.error_l2, self.golden_l2)

    def then(self, other: Measures) -> Measures:
        """These measures and those of the elements that follow."""
        first = self.worst is not None and (other.worst is None or self.max_error >= other.max_error)
        return Measures(
            self.count + other.count,
            self.over + other.over,
            max(self.max_error, other.max_error),
            self.worst if first else _shifted(other.worst, self.count),
            math.hypot(self.error_l2, other.error_l2),
            math.hypot(self.golden_l2, other.golden_l2),
            self.mismatched + other.mismatched,
            _shifted(other.first_mismatch, self.count)
            if self.first_mismatch is None
            else self.first_mismatch,
        )


def measure(actual: Array, golden: Array, bound: float = 0.0, *, bitwise: bool = False) -> Measures:
    """Compare two arrays of equal shape, of any dtypes a dump can hold.

    Args:
        bound: errors above it are counted in ``over``; integers and booleans are compared exactly.
        bitwise: count the elements whose bytes differ instead (both arrays then have the same dtype).
    """
    found = Measures()
    floats = is_float(actual.dtype) or is_float(golden.dtype)
    with np.errstate(all="ignore"):  # not-a-numbers and overflows are what is looked for
        for a, g in _chunks(actual, golden):
            part = _floats(a, g, bound) if floats else _exact(a, g)
            found = found.then(_with_bytes(part, a, g) if bitwise else part)
    return found


def largest(array: Array) -> float:
    """Largest finite absolute value, 0.0 where there is none."""
    found = 0.0
    with np.errstate(all="ignore"):
        for (part,) in _chunks(array):
            wide = np.abs(part.astype(np.float64, copy=False))
            found = max(found, float(np.max(wide, initial=0.0, where=np.isfinite(wide))))
    return found


def nonfinite(array: Array) -> NDArray[np.bool_]:
    """Where an array holds NaN or infinity, in its shape."""
    if not is_float(array.dtype):
        return np.zeros(array.shape, bool)
    with np.errstate(all="ignore"):
        return np.logical_not(np.isfinite(array))


def ulp_distance(a: Array, b: Array) -> NDArray[np.uint64]:
    """Representable values between two arrays of the same floating dtype: 0 for equal values, 1 for neighbours.

    Both zeros are one value; infinity follows the largest finite number. What it says of NaN means nothing.
    """
    if a.dtype != b.dtype or not is_float(a.dtype):
        raise TypeError(f"ulps lie between values of one floating dtype, not between {a.dtype} and {b.dtype}")
    x, y = _ordered(a), _ordered(b)
    # the difference of two 64-bit integers may need 64 bits itself, so it is taken modulo 2**64
    return np.where(x >= y, x.view(np.uint64) - y.view(np.uint64), y.view(np.uint64) - x.view(np.uint64))


def ulps_apart(actual: Array, golden: Array) -> float | None:
    """Units in the last place of the actual dtype between two 0-d values; None for other than finite floats.

    Golden values of another dtype need not be representable: their distance is measured in the spacing of the
    actual dtype around them, so it may be a fraction.
    """
    if not is_float(actual.dtype) or not (np.isfinite(float(actual)) and np.isfinite(float(golden))):
        return None
    if actual.dtype == golden.dtype:
        return float(ulp_distance(actual, golden))
    info = ml_dtypes.finfo(actual.dtype)
    exponent = math.frexp(max(abs(float(golden)), float(info.smallest_normal)))[1] - 1
    return abs(float(actual) - float(golden)) / math.ldexp(1.0, exponent - int(info.nmant))


def ratio(part: float, whole: float) -> float:
    """``part / whole``, where nothing out of nothing is 0 and something out of nothing is infinite."""
    if math.isinf(whole):
        return 0.0
    return part / whole if whole else math.inf if part else 0.0


def _chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, CHUNK):
        yield tuple(array[start : start + CHUNK] for array in flat)


def _floats(a: Array, g: Array, bound: float) -> Measures:
    x, y = a.astype(np.float64, copy=False), g.astype(np.float64, copy=False)
    error = np.abs(x - y)
    finite = np.isfinite(x) & np.isfinite(y)
    mismatched = 0
    first: int | None = None
    if not finite.all():
        other = ~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))
        mismatched = int(other.sum())
        first = int(other.argmax()) if mismatched else None
        error, y = np.where(finite, error, 0.0), np.where(finite, y, 0.0)
    worst = int(error.argmax())
    return Measures(
        a.size,
        int(np.count_nonzero(error > bound)),
        float(error[worst]),
        worst if error[worst] else None,
        _norm(error),
        _norm(y),
        mismatched,
        first,
    )


def _exact(a: Array, g: Array) -> Measures:
    """Integers differ exactly; how far the worst is off is then known to 53 bits."""
    differing = np.flatnonzero(a != g)
    norm = _norm(g.astype(np.float64))
    if not differing.size:
        return Measures(a.size, golden_l2=norm)
    error = np.abs(a[differing].astype(np.float64) - g[differing].astype(np.float64))
    worst = int(differing[error.argmax()])
    off = float(abs(int(a[worst]) - int(g[worst])))
    return Measures(a.size, differing.size, off, worst, _norm(error), norm)


def _with_bytes(part: Measures, a: Array, g: Array) -> Measures:
    width = a.dtype.itemsize
    x, y = (np.ascontiguousarray(array).view(np.uint8).reshape(-1, width) for array in (a, g))
    differing = np.flatnonzero((x != y).any(axis=1))
    worst = part.worst if part.worst is not None or not differing.size else int(differing[0])
    return Measures(
        part.count,
        differing.size,
        part.max_error,
        worst,
        part.error_l2,
        part.golden_l2,
        part.mismatched,
        part.first_mismatch,
    )


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


def _ordered(array: Array) -> NDArray[np.int64]:
    """Integers in the order of the floats, neighbours one apart: sign and magnitude become two's complement."""
    width = array.dtype.itemsize
    bits = array.view(f"i{width}").astype(np.int64)
    least = np.int64(-(2 ** (8 * width - 1)))
    return np.where(bits < 0, least - bits, bits)


def _shifted(index: int | None, by: int) -> int | None:
    return None if index is None else index + by
