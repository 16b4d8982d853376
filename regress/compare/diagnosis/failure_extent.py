"""Affected tokens or parts of a tensor, and the form of the wrong values.

These are counts; `regress.compare.diagnosis.common_patterns` decides what several of them prove together.
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
from regress.compare.verdicts.affected_elements import Count
from regress.dump.numpy_arrays import Array, dtype_name, is_float

LIMIT = 1 << 24
"""Most elements of a tensor that is examined, since several copies of it are made."""


ROUNDINGS: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
"""Dtypes that values may be rounded to, the narrowest first."""
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
        agreeing = there & ~hit
        found["positions"] = _ends(traits.position[hit], traits.position[agreeing])
        intact = there & ~np.isin(samples, chosen)
        found["lengths"] = _ends(traits.length[hit], traits.length[intact])
    return found


def _count(hit: NDArray[np.bool_], there: NDArray[np.bool_], samples: NDArray[np.int64]) -> Count:
    ids = (np.unique(samples[hit]).size, np.unique(samples[there]).size)
    return Count(int(hit.sum()), int(there.sum()), *map(int, ids))


def _ends(hit: NDArray[np.int64], agreeing: NDArray[np.int64]) -> tuple[int, int, int, int] | None:
    if not hit.size or not agreeing.size:
        return None
    return int(hit.min()), int(hit.max()), int(agreeing.min()), int(agreeing.max())


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
    """Return the narrowest dtype that holds all affected values, where the golden ones need more; None without one.

    The errors must be those of rounding, too: of the size of the dtype's spacing, and of either sign.
    """
    if dtype_name(actual.dtype) not in ("float32", "float64") or int(over.sum()) < 8:
        return None
    values, before = actual[over].astype(np.float64), golden[over].astype(np.float64)
    if not np.isfinite(values).all():
        return None
    own = np.unique(before, return_index=True)[1]  # repeated values are not evidence of their own
    values, before = values[own], before[own]
    few = np.unique(values).size < 8
    for name, dtype in ROUNDINGS.items():
        if few:  # whose sizes and signs prove nothing: each must be the golden value, rounded
            with np.errstate(over="ignore"):
                same = np.array_equal(before.astype(dtype).astype(np.float64), values)
            if same and name != dtype_name(actual.dtype):
                return name
            continue
        with np.errstate(over="ignore"):
            fits = np.array_equal(values.astype(dtype).astype(np.float64), values)
            golden_fits = before.astype(dtype).astype(np.float64) == before
        if fits and np.mean(golden_fits) < 0.5 and name != dtype_name(actual.dtype):
            return name if _by_rounding(values - before, before, dtype) else None
    return None


def _by_rounding(errors: NDArray[np.float64], golden: NDArray[np.float64], dtype: Any) -> bool:
    """Return True for errors of a few spacings of a dtype without a common sign."""
    units = np.abs(errors) / np.maximum(np.abs(golden) * float(ml_dtypes.finfo(dtype).eps), 1e-300)
    return float(np.median(units)) <= 1.0 and not one_sided(errors)


def one_sided(errors: NDArray[np.float64]) -> bool:
    """Return True if errors share a sign more often than chance lets them."""
    signs = np.sign(errors[errors != 0])
    count = signs.size
    if not count:
        return False
    return abs(float(signs.sum())) > 3.0 * math.sqrt(count) or (count >= 8 and abs(signs.sum()) == count)


def of_samples(
    actual: Array, golden: Array, compared: NDArray[np.bool_] | None, samples: NDArray[np.int64]
) -> dict[str, dict[str, Any]]:
    """Return the pattern of values that are, sample by sample, the golden ones times a number; empty without one.

    Args:
        samples: ``[P]`` sample of each place, -1 for padding.
    """
    there = samples >= 0 if compared is None else (compared.reshape(-1) & (samples >= 0))
    values, before = (array.reshape(-1).astype(np.float64) for array in (actual, golden))
    there = there & (before != 0)
    if not np.isfinite(values[there]).all() or (values[(samples >= 0) & ~there & (before == 0)] != 0).any():
        return {}
    factors, own = values[there] / before[there], samples[there]
    known, number = np.unique(own, return_inverse=True)
    if len(known) < 2 or len(own) - len(known) < 8:
        return {}
    mean = np.bincount(number, factors) / np.bincount(number)
    off = np.abs(factors - mean[number]) > 1e-6 * np.maximum(np.abs(mean[number]), 1e-3)
    if off.any() or np.ptp(mean) <= 1e-6 * float(np.abs(mean).max()):
        return {}
    return {"per_sample": {}}


def one_value(actual: Array, golden: Array, over: NDArray[np.bool_]) -> float | None:
    """Return the number that all affected values equal, at least eight of them in place of different ones."""
    if not is_float(golden.dtype) or int(over.sum()) < 8 or np.unique(golden[over]).size < 4:
        return None
    values = np.unique(actual[over])
    return float(f"{float(values[0]):.6g}") if values.size == 1 and np.isfinite(values[0]) else None


def _spacing(actual: Array, values: NDArray[np.float64]) -> float:
    return 4 * spacing(actual.dtype) * float(np.abs(values).max())


def by_chance(size: int, total: int, hits: int) -> float:
    """Return the probability that ``hits`` of ``total``, drawn by chance, all lie among ``size`` of them."""
    if hits > size:
        return 0.0
    return math.exp(_log_choose(size, hits) - _log_choose(total, hits))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
