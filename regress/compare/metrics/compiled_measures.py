"""Measures of two arrays of one floating dtype by compiled loops."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics import measure_kernels
from regress.compare.metrics.chunked_measures import measure_chunks
from regress.compare.metrics.error_measures import Measures, RowNorms
from regress.dump.numpy_arrays import DTYPES, Array

_NONE = np.zeros(0, np.int32)


def measure_compiled(a: Array, g: Array, bound: float, bitwise: bool, row: int | None) -> Measures:
    """Measure two flat arrays of one floating dtype; see `regress.compare.metrics.striped_measures.measure`."""
    sums, counts, octaves = _nothing()
    width = a.dtype.itemsize
    p, q = _bits(a), _bits(g)
    if width >= 4:
        x, y = _plain(a), _plain(g)
        measure_kernels.scan(x, y, p, q, row or 0, bound, bitwise, sums, counts, octaves)
    else:
        how, table = _widening(a.dtype)
        measure_kernels.scan_narrow(p, q, how, table, row or 0, bound, bitwise, sums, counts, octaves)
    if width == 8 and not _in_range(sums):
        return measure_chunks(a, g, bound, bitwise, row)
    return _measures(a.size, sums, counts, octaves, row)


def _nothing() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    counts = np.zeros(8, np.int64)
    counts[
        [
            measure_kernels.WORST,
            measure_kernels.FIRST_MISMATCH,
            measure_kernels.DIFFERENT,
            measure_kernels.ROW,
        ]
    ] = -1
    return np.zeros(8), counts, np.zeros(2048, np.int64)


def _plain(array: Array) -> Array:
    """Return an aligned, read-only array, so that code is compiled for one kind only."""
    array = np.require(array, requirements=["C", "A"]).view()
    array.flags.writeable = False
    return array


def _bits(array: Array) -> Array:
    return _plain(array).view(f"i{array.dtype.itemsize}")


@cache
def _widening(dtype: np.dtype[Any]) -> tuple[int, Array]:
    """Return how a narrow dtype becomes float32."""
    if dtype == DTYPES["bfloat16"]:
        return measure_kernels.SHIFTED, _NONE
    if dtype == DTYPES["float16"]:
        return measure_kernels.HALF, _NONE
    with np.errstate(invalid="ignore"):
        return measure_kernels.TABLE, np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).view(
            np.int32
        )


def _in_range(sums: NDArray[np.float64]) -> bool:
    """Return True if squares stayed within the range of float64, as those of float32 always do."""
    squares = [
        sums[measure_kernels.GOLDEN],
        *([sums[measure_kernels.SQUARE]] if sums[measure_kernels.TOP] else []),
    ]
    return all(1e-280 < square < math.inf for square in squares)


def _measures(
    count: int,
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
    octaves: NDArray[np.int64],
    row: int | None,
) -> Measures:
    square, golden, product, total, top, relative, row_square, row_golden = sums.tolist()
    over, worst, mismatched, first, finite, ulps, different, index = counts.tolist()
    found = worst if worst >= 0 else different
    return Measures(
        count=count,
        over=over,
        max_error=top,
        worst=found if found >= 0 else None,
        error_l2=math.sqrt(square),
        golden_l2=math.sqrt(golden),
        mismatched=mismatched,
        first_mismatch=first if first >= 0 else None,
        finite=finite,
        error_sum=total,
        product=product,
        max_relative=relative,
        max_ulp=float(ulps % 2**64) if finite else None,
        octaves={int(k) - 1022: int(octaves[k]) for k in np.flatnonzero(octaves) if k},
        worst_row=RowNorms(index, math.sqrt(row_square), math.sqrt(row_golden))
        if row and index >= 0
        else None,
    )
