"""Measures of two arrays by numpy, chunk by chunk: no full copy in float64 is ever made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.error_measures import Measures, RowNorms
from regress.compare.metrics.ulps import most_ulps
from regress.dump.numpy_arrays import Array, is_float

CHUNK = 1 << 13
"""Number of elements of a chunk: their float64 copies stay in a processor's cache, and one thread adds them up."""


def measure_chunks(a: Array, g: Array, bound: float, bitwise: bool, row: int | None) -> Measures:
    """Measure two flat arrays of any dtypes a dump can hold; see `regress.compare.metrics.striped_measures.measure`."""
    found = Measures()
    floats = is_float(a.dtype) or is_float(g.dtype)
    rows = 0
    with np.errstate(all="ignore"):  # not-a-numbers and overflows are searched for
        for x, y in chunks(row, a, g):
            part = _floats(x, y, bound, row) if floats else _exact(x, y, row)
            found = found.then(_with_bytes(part, x, y) if bitwise else part, rows)
            rows += x.size // row if row else 0
    return found


def chunks(row: int | None, *flat: Array) -> Iterator[tuple[Array, ...]]:
    """Yield parts of flat arrays, of whole rows each."""
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
        square = float(np.dot(signed, signed))
    error = np.abs(signed)
    worst = int(error.argmax())
    highest = float(error[worst])
    max_ulp = 0.0 if counted and is_float(a.dtype) else None
    if not highest:
        return Measures(a.size, 0, 0.0, None, 0.0, norm(y), mismatched, first, counted, max_ulp=max_ulp)
    size = np.abs(y)
    return Measures(
        count=a.size,
        over=int(np.count_nonzero(error > bound)) if highest > bound else 0,
        max_error=highest,
        worst=worst,
        error_l2=norm(error, square),
        golden_l2=norm(y),
        mismatched=mismatched,
        first_mismatch=first,
        finite=counted,
        error_sum=float(np.add.reduce(signed)),
        product=float(np.dot(signed, y)),
        max_relative=float(np.fmax.reduce(error / size)),
        max_ulp=None if max_ulp is None else most_ulps(a, g, error, size, whole=counted == a.size),
        octaves=_octaves(error),
        worst_row=_worst_row(error, y, row),
    )


def _exact(a: Array, g: Array, row: int | None) -> Measures:
    """Measure exact differences of integers; the largest one is known to 53 bits."""
    differing = np.flatnonzero(a != g)
    golden = g.astype(np.float64)
    found = Measures(a.size, golden_l2=norm(golden), finite=a.size)
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
        error_l2=norm(error),
        error_sum=float(signed.sum()),
        product=float(np.dot(signed, golden)),
        max_relative=float(np.fmax.reduce(error / np.abs(golden))),
        octaves=_octaves(error),
        worst_row=_worst_row(error, golden, row),
    )


def _with_bytes(part: Measures, a: Array, g: Array) -> Measures:
    x, y = (np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") for array in (a, g))
    differing = np.flatnonzero(x != y)
    worst = part.worst if part.worst is not None or not differing.size else int(differing[0])
    return replace(part, over=differing.size, worst=worst)


def _octaves(error: NDArray[np.float64]) -> dict[int, int]:
    """Count errors by binary exponent, except those that are 0 or subnormal."""
    exponents = error.view(np.int64) >> 52
    lowest = int(np.minimum.reduce(exponents))
    exponents -= lowest
    counts = np.bincount(exponents)
    if not lowest:
        counts[0] = 0
    filled = counts.nonzero()[0]
    return dict(zip((filled + (lowest - 1022)).tolist(), counts[filled].tolist(), strict=True))


def _worst_row(error: NDArray[np.float64], golden: NDArray[np.float64], row: int | None) -> RowNorms | None:
    if not row:
        return None
    rows = error.reshape(-1, row)
    index = int(np.einsum("ij,ij->i", rows, rows).argmax())
    return RowNorms(index, norm(rows[index]), norm(golden.reshape(-1, row)[index]))


def norm(values: NDArray[np.float64], square: float | None = None) -> float:
    """Return the Euclidean norm, scaled only if squares leave float64's range; ``square`` is their sum, if known."""
    norm = math.sqrt(float(np.dot(values, values)) if square is None else square)
    if 1e-140 < norm < math.inf:
        return norm
    top = float(np.max(np.abs(values), initial=0.0))
    if top == 0.0 or math.isinf(top):
        return top
    units = values / top
    return top * math.sqrt(float(np.dot(units, units)))
