"""Tokens or parts of a tensor that are beyond their tolerance, and the form of the wrong values.

These are counts; `regress.compare.diagnosis.common_patterns` decides what several of them prove together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.dump.numpy_arrays import Array, is_float


@dataclass(frozen=True)
class Count:
    """Failing and total counts for one token class, in tokens and in samples."""

    hits: int
    size: int
    hit_samples: int
    samples: int

    def and_(self, other: Count) -> Count:
        """Return the sum of the counts of two tensors, which hold different samples."""
        return Count(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def astuple(count: Count) -> tuple[int, int, int, int]:
    """Return the four numbers of a count."""
    return count.hits, count.size, count.hit_samples, count.samples


@dataclass(frozen=True)
class Affected:
    """The affected part of a failing tensor.

    Attributes:
        unit: ``"token"``, or ``"element"`` where tensors have no tokens.
        total: count of all compared units.
        samples: the first of the affected ones, ``group/run``.
        positions: least and largest position of an affected token, and of one that holds.
        lengths: least and largest length of a sample with an affected token, and of one without.
        classes: counts of the classes of tokens, see `regress.compare.diagnosis.token_attributes.CLASSES`.
        parts: ``(dimension, first, stop, size)`` for each dimension in which one block alone is affected.
        offset: the number that was added to every affected element, if one was.
        rounded: the narrower dtype that can hold every affected value, while the golden ones need more.
        held: hypotheses that explain the affected values, with numbers: ``{"equals": {"what": "ref_log_probs"}}``.
        hits: number of affected elements that each hypothesis says something about.
    """

    unit: str
    total: Count
    samples: tuple[str, ...] = ()
    positions: tuple[int, int, int, int] | None = None
    lengths: tuple[int, int, int, int] | None = None
    classes: Mapping[str, Count] = field(default_factory=dict)
    parts: tuple[tuple[int, int, int, int], ...] = ()
    offset: float | None = None
    rounded: str | None = None
    held: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Affected:
        """Rebuild what `to_json` wrote."""
        known: dict[str, Any] = {spec.name: data[spec.name] for spec in fields(cls) if spec.name in data}
        known["total"] = Count(**known["total"])
        known["classes"] = {name: Count(**count) for name, count in known["classes"].items()}
        for name in ("samples", "positions", "lengths"):
            known[name] = None if known[name] is None else tuple(known[name])
        known["parts"] = tuple(tuple(part) for part in known["parts"])
        return cls(**known)


def beyond(actual: Array, golden: Array, bound: float, *, bitwise: bool = False) -> NDArray[np.bool_]:
    """Return a mask of elements that differ by more than a bound; a NaN agrees with a NaN, an infinity with itself."""
    if bitwise:
        size = actual.dtype.itemsize
        parts = (
            np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, size)
            for array in (actual, golden)
        )
        first, second = parts
        return np.asarray((first != second).any(axis=-1))
    if not is_float(golden.dtype):
        return np.asarray(actual != golden)
    actual_values, golden_values = actual.astype(np.float64), golden.astype(np.float64)
    with np.errstate(invalid="ignore"):
        far = np.abs(actual_values - golden_values) > bound
    alike = (actual_values == golden_values) | (np.isnan(actual_values) & np.isnan(golden_values))
    return np.asarray(~alike & (far | ~np.isfinite(actual_values) | ~np.isfinite(golden_values)))
