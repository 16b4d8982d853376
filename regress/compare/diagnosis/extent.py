"""Affected tokens or parts of a tensor, and the form of the wrong values.

These are counts; `regress.compare.diagnosis.patterns` decides what several of them prove together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.token_attributes import TokenAttributes
from regress.compare.metrics.ulps import spacing
from regress.compare.verdicts.affected import Count
from regress.dump.arrays import Array, dtype_name, is_float

LIMIT = 1 << 24
"""Most elements of a tensor that is examined, since several copies of it are made."""


_LISTED = 8  # samples named


def affected_tokens(
    over: NDArray[np.bool_], compared: NDArray[np.bool_], traits: TokenAttributes
) -> dict[str, Any]:
    """Count the affected tokens of a tensor whose leading dimensions are places of tokens.

    Args:
        over: elements beyond the tolerance; ``compared``: which places are looked at.
    """
    places = len(traits.sample)
    hit = over.reshape(places, -1).any(axis=1) & compared.reshape(-1)
    there = compared.reshape(-1) & (traits.sample >= 0)
    hit &= there
    samples = traits.sample
    found: dict[str, Any] = {
        "unit": "token",
        "total": _count(hit, there, samples),
        "classes": {
            name: _count(hit & members, there & members, samples)
            for name, members in traits.classes.items()
            if (there & members).any()
        },
    }
    if hit.any():
        chosen = np.unique(samples[hit])
        found["samples"] = tuple(traits.names[i] for i in chosen[:_LISTED])
        held = there & ~hit
        found["positions"] = _ends(traits.position[hit], traits.position[held])
        intact = there & ~np.isin(samples, chosen)
        found["lengths"] = _ends(traits.length[hit], traits.length[intact])
    return found


def _count(hit: NDArray[np.bool_], there: NDArray[np.bool_], samples: NDArray[np.int64]) -> Count:
    ids = (np.unique(samples[hit]).size, np.unique(samples[there]).size)
    return Count(int(hit.sum()), int(there.sum()), *map(int, ids))


def _ends(hit: NDArray[np.int64], held: NDArray[np.int64]) -> tuple[int, int, int, int] | None:
    if not hit.size or not held.size:
        return None
    return int(hit.min()), int(hit.max()), int(held.min()), int(held.max())


def blocks(over: NDArray[np.bool_], first: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(dimension, start, stop, size)`` where the affected elements fill one block of a dimension."""
    for dimension in range(first, over.ndim):
        size = over.shape[dimension]
        rows = over.any(axis=tuple(d for d in range(over.ndim) if d != dimension))
        index = np.flatnonzero(rows)
        start, stop = int(index[0]), int(index[-1]) + 1
        if stop - start < size and len(index) == stop - start:
            yield dimension, start, stop, size


def constant_offset(actual: Array, golden: Array, over: NDArray[np.bool_], bound: float) -> float | None:
    """Return the number added to all affected elements, three or more of different values; None without one."""
    if not is_float(golden.dtype) or int(over.sum()) < 3:
        return None
    before = golden[over].astype(np.float64)
    errors = actual[over].astype(np.float64) - before
    if not np.isfinite(errors).all():
        return None
    offset = float(np.median(errors))
    slack = max(bound, 64 * np.finfo(np.float64).eps * float(np.abs(before).max()), _spacing(actual, before))
    spread = float(np.ptp(before))
    if abs(offset) <= 4 * slack or spread <= 8 * slack or float(np.abs(errors - offset).max()) > slack:
        return None
    return offset


def rounded_to(actual: Array, golden: Array, over: NDArray[np.bool_]) -> str | None:
    """Return the narrowest dtype that holds all affected values, where the golden ones need more; None without one."""
    if dtype_name(actual.dtype) not in ("float32", "float64") or int(over.sum()) < 8:
        return None
    values, before = actual[over].astype(np.float64), golden[over].astype(np.float64)
    if not np.isfinite(values).all() or np.unique(values).size < 8:
        return None
    names = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    for name, dtype in names.items():
        with np.errstate(over="ignore"):
            fits = np.array_equal(values.astype(dtype).astype(np.float64), values)
            golden_fits = before.astype(dtype).astype(np.float64) == before
        if fits and np.mean(golden_fits) < 0.5 and name != dtype_name(actual.dtype):
            return name
    return None


def _spacing(actual: Array, values: NDArray[np.float64]) -> float:
    return 4 * spacing(actual.dtype) * float(np.abs(values).max())


def by_chance(size: int, total: int, hits: int) -> float:
    """Return the probability that ``hits`` of ``total``, drawn by chance, all lie among ``size`` of them."""
    if hits > size:
        return 0.0
    return math.exp(_log_choose(size, hits) - _log_choose(total, hits))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
