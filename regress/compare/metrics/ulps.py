"""Units in the last place: how many representable values lie between two numbers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from regress.dump.numpy_arrays import Array, is_float

_FEW = 1 << 9
"""Number of elements up to which measuring all is faster than finding those with the largest distance."""
_EXPONENT = np.int64(0x7FF << 52)


def ulp_distance(a: Array, b: Array) -> NDArray[np.uint64]:
    """Count representable values between two arrays of the same floating dtype: 0 for equal values, 1 for neighbours.

    Both zeros are one value; infinity follows the largest finite number. The result for NaN is meaningless.
    """
    if a.dtype != b.dtype or not is_float(a.dtype):
        raise TypeError(f"ulps lie between values of one floating dtype, not between {a.dtype} and {b.dtype}")
    x, y = _ordered(a), _ordered(b)
    # the difference of two 64-bit integers may need 64 bits itself, so it is taken modulo 2**64
    return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)


def ulps_apart(actual: Array, golden: Array) -> float | None:
    """Return the units in the last place of the actual dtype between two 0-d values; None for other than finite floats.

    Golden values of another dtype need not be representable: their distance is measured in the spacing of the
    actual dtype around them, so it may be a fraction.
    """
    if not is_float(actual.dtype):
        return None
    a, g = float(actual), float(golden)
    if not (math.isfinite(a) and math.isfinite(g)):
        return None
    if actual.dtype == golden.dtype:
        return float(abs(_rank(actual) - _rank(golden)))
    digits, least = _grid(actual.dtype)
    exponent = math.frexp(max(abs(g), least))[1] - 1
    return abs(a - g) / math.ldexp(1.0, exponent - digits)


def most_ulps(
    actual: Array,
    golden: Array,
    error: NDArray[np.float64],
    size: NDArray[np.float64],
    *,
    whole: bool = False,
) -> float:
    """Return the largest of `ulps_apart` over the elements of two arrays of floats.

    Args:
        error: ``|actual - golden|`` in float64; 0 where it is not finite.
        size: ``|golden|`` in float64, likewise.
        whole: True if all values are finite.
    """
    if actual.size <= _FEW and actual.dtype == golden.dtype and whole:
        return float(np.maximum.reduce(ulp_distance(actual, golden)))
    digits, least = _grid(actual.dtype)
    steps = error / np.maximum(size, least)
    # an error of so many ulps is a relative one of so many eps, or of half as many, unless it leaves the octave
    near = np.flatnonzero(steps >= 0.4 * min(float(np.maximum.reduce(steps)), 0.25))
    if actual.dtype == golden.dtype:
        return float(np.maximum.reduce(ulp_distance(actual[near], golden[near])))
    octave = (np.maximum(size[near], least).view(np.int64) & _EXPONENT).view(np.float64)
    return float(np.maximum.reduce(error[near] / octave)) * 2.0**digits


def spacing(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next number of a floating dtype; that of float64 for any other dtype."""
    return 2.0 ** -_grid(dtype)[0] if is_float(dtype) else 2.0**-52


@cache
def _grid(dtype: np.dtype[Any]) -> tuple[int, float]:
    """Return the stored digits of a floating dtype, and its least normal number."""
    info = ml_dtypes.finfo(dtype)
    return int(info.nmant), float(info.smallest_normal)


def _ordered(array: Array) -> NDArray[np.int64]:
    """Map floats to integers in the same order, neighbours one apart: sign and magnitude become two's complement."""
    width = array.dtype.itemsize
    bits = array.view(f"i{width}").astype(np.int64)
    sign = bits >> 63
    bits &= 2 ** (8 * width - 1) - 1
    bits ^= sign
    bits -= sign
    return bits


def _rank(value: Array) -> int:
    """Return `_ordered` of a 0-d array in plain Python, which is faster for one number."""
    width = value.dtype.itemsize
    bits = int(value.view(f"i{width}"))
    return bits if bits >= 0 else -(bits & (2 ** (8 * width - 1) - 1))
