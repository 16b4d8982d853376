"""Units in the last place: how many representable values lie between two numbers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from regress.dump.arrays import Array, is_float

_EXPONENT = np.int64(0x7FF << 52)


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
    digits, least = _grid(actual.dtype)
    exponent = math.frexp(max(abs(float(golden)), least))[1] - 1
    return abs(float(actual) - float(golden)) / math.ldexp(1.0, exponent - digits)


def ulps_off(
    actual: Array, golden: Array, error: NDArray[np.float64], wide: NDArray[np.float64]
) -> NDArray[Any] | None:
    """`ulps_apart` of each element of two arrays; None where the actual ones are no floats.

    Args:
        error: ``|actual - golden|`` in float64.
        wide: the golden values in float64.
    """
    if actual.dtype == golden.dtype:
        return ulp_distance(actual, golden) if is_float(actual.dtype) else None
    if not is_float(actual.dtype):
        return None
    digits, least = _grid(actual.dtype)
    octave = (np.maximum(np.abs(wide), least).view(np.int64) & _EXPONENT).view(np.float64)
    return error / (octave * 2.0**-digits)


@cache
def _grid(dtype: np.dtype[Any]) -> tuple[int, float]:
    """Stored digits of a floating dtype, and its least normal number."""
    info = ml_dtypes.finfo(dtype)
    return int(info.nmant), float(info.smallest_normal)


def _ordered(array: Array) -> NDArray[np.int64]:
    """Integers in the order of the floats, neighbours one apart: sign and magnitude become two's complement."""
    width = array.dtype.itemsize
    bits = array.view(f"i{width}").astype(np.int64)
    least = np.int64(-(2 ** (8 * width - 1)))
    return np.where(bits < 0, least - bits, bits)
