"""Measures of a pair of arrays, in one pass over them, whatever their size.

Arrays are taken stripe by stripe, so that no more than the stripes at hand lies in memory, also of mapped files, and
stripes are spread over threads. Two ways lead to the same measures: numpy for small arrays, integers or two dtypes, and
compiled loops (`regress.compare.metrics.measure_kernels`), whose import takes longer than a small comparison, for
arrays of one floating dtype with at least `LARGE` elements, where the extra ``fast`` is installed. Counts and maxima
are the same either way, to the last bit (`max_relative` but for 1e-15 of it); sums are of float64 and agree within
1e-12 of the sum of their terms' sizes. On one kind of processor measures are always the same, however many threads
there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.chunked_measures import CHUNK, chunks, measure_chunks, norm
from regress.compare.metrics.error_measures import QUANTILES, Measures, ratio
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array, is_float

__all__ = ["QUANTILES", "Measures", "largest", "measure", "nonfinite", "ratio", "scaled_residual"]

LARGE = 1 << 20
"""Number of elements from which compiled loops are worth their loading time."""
STRIPE = 1 << 22
"""Number of elements that one thread measures before they are merged with the others, and released if mapped."""


def measure(
    actual: Array,
    golden: Array,
    bound: float = 0.0,
    *,
    bitwise: bool = False,
    row: int | None = None,
    threads: int = 1,
) -> Measures:
    """Compare two arrays of equal shape, of any dtypes a dump can hold.

    Args:
        bound: errors above it are counted in ``over``; integers and booleans are compared exactly.
        bitwise: count the elements whose bytes differ instead (both arrays then have the same dtype).
        row: elements of a row, which divides their number; None for no rows.
        threads: number of threads that measure stripes.

    Raises:
        ValueError: if the shapes differ, or rows do not fit into them: compiled code would read beyond the arrays.
    """
    if actual.shape != golden.shape or (row is not None and (row < 1 or actual.size % row)):
        raise ValueError(f"arrays of shape {actual.shape} and {golden.shape} are not pairs of rows of {row}")
    part = _measure_for(actual, golden)
    if actual.size <= CHUNK:  # small arrays are not worth the stripes
        return part(actual.reshape(-1), golden.reshape(-1), float(bound), bitwise, row)

    def work(stripe: tuple[Array, ...]) -> Measures:
        with _flat(stripe) as (a, g):
            return part(a, g, float(bound), bitwise, row)

    found, rows = Measures(), 0
    for each in _spread(work, _stripes(row, actual, golden), threads):
        found = found.then(each, rows)
        rows += each.count // row if row else 0
    return found


def scaled_residual(pairs: Iterable[tuple[Array, Array]], alpha: float) -> float:
    """Return ``||actual - alpha golden|| / ||golden||`` over finite pairs, to the last digits of float64.

    Args:
        pairs: actual and golden arrays of one shape.
    """
    error = size = 0.0
    with np.errstate(all="ignore"):
        for stripe in (stripe for pair in pairs for stripe in _stripes(None, *pair)):
            with _flat(stripe) as flat:
                for a, g in chunks(None, *flat):
                    x, y = a.astype(np.float64), g.astype(np.float64)
                    finite = np.isfinite(x) & np.isfinite(y)
                    error = math.hypot(error, norm(np.where(finite, x - alpha * y, 0.0)))
                    size = math.hypot(size, norm(np.where(finite, y, 0.0)))
    return ratio(error, size)


def largest(array: Array) -> float:
    """Return the largest finite absolute value, 0.0 where there is none."""
    found = 0.0
    with np.errstate(all="ignore"):
        if array.size <= CHUNK:
            return _top(array.reshape(-1)) if array.size else 0.0
        for stripe in _stripes(None, array):
            with _flat(stripe) as (flat,):
                for (part,) in chunks(None, flat):
                    found = max(found, _top(part))
    return found


def nonfinite(array: Array) -> NDArray[np.bool_]:
    """Return a mask of NaN and infinities in the shape of an array."""
    if not is_float(array.dtype):
        return np.zeros(array.shape, bool)
    with np.errstate(all="ignore"):
        return np.logical_not(np.isfinite(array))


def _measure_for(actual: Array, golden: Array) -> Callable[[Array, Array, float, bool, int | None], Measures]:
    alike = actual.dtype == golden.dtype and is_float(actual.dtype)
    if actual.size < LARGE or not alike or not _compiles():
        return measure_chunks
    from regress.compare.metrics.compiled_measures import (
        measure_compiled,  # numba takes half a second to load
    )

    return measure_compiled


@cache
def _compiles() -> bool:
    """Return True if numba is there, which the extra ``fast`` brings."""
    return find_spec("numba") is not None


def _stripes(row: int | None, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield parts of arrays of one shape in C order, of whole rows each; none is copied."""
    first = arrays[0]
    if first.size <= max(STRIPE, row or 0):
        if first.size:
            yield arrays
    elif all(array.flags.c_contiguous for array in arrays):
        flat = [array.reshape(-1) for array in arrays]
        step = STRIPE if not row else max(STRIPE // row, 1) * row
        for start in range(0, first.size, step):
            yield tuple(array[start : start + step] for array in flat)
    elif step := STRIPE * len(first) // first.size:
        for start in range(0, len(first), step):
            yield tuple(array[start : start + step] for array in arrays)
    else:
        for parts in zip(*arrays, strict=True):
            yield from _stripes(row, *parts)


@contextmanager
def _flat(stripe: tuple[Array, ...]) -> Iterator[tuple[Array, ...]]:
    """Yield the parts as flat arrays, copied if need be, and release mapped memory afterwards."""
    yield tuple(part.reshape(-1) for part in stripe)
    for part in stripe:
        release(part)


def _spread(
    work: Callable[[tuple[Array, ...]], Measures], stripes: Iterator[tuple[Array, ...]], threads: int
) -> Iterator[Measures]:
    """Yield the results of the stripes, in their order."""
    if threads == 1:
        yield from map(work, stripes)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, stripes)


def _top(part: Array) -> float:
    wide = np.abs(part.astype(np.float64, copy=False))
    top = float(np.maximum.reduce(wide))
    return top if math.isfinite(top) else float(np.max(wide, initial=0.0, where=np.isfinite(wide)))
