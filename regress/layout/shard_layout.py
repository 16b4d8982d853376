"""Shard layouts: the part of a tensor that a rank holds.

Canonical coordinates of an element are its indices in the whole (logical) tensor; no layout can change them.
A :class:`ShardLayout` states, for each dimension, which indices lie in a rank's local tensor. Row and column
shards, uneven and empty ones, fused weights (several ranges of one dimension), slices of experts, of a
sequence or of a vocabulary are all shard layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
"""``(start, stop)``: indices ``start:stop`` of one dimension."""


@dataclass(frozen=True)
class ShardLayout:
    """The part of a tensor that lies on one rank: ``local == full[np.ix_(*(concatenated ranges of each dimension))]``.

    Adjacent ranges are joined, so layouts are equal when they hold the same elements in the same order.

    Args:
        shape: shape of the whole tensor.
        ranges: ranges of each dimension, in local order; several where a weight is fused, none where the rank
            holds nothing of it.

    Raises:
        ValueError: if the dimensions do not match, or a range is empty, leaves its dimension or overlaps another one.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"the shape {list(shape)} of a whole tensor has a negative size")
        if len(self.ranges) != len(shape):
            raise ValueError(
                f"ranges are given for {len(self.ranges)} dimensions of a tensor of shape {list(shape)}; give one list "
                "of ranges for each dimension"
            )
        ranges = tuple(_joined(found, dim, shape) for dim, found in enumerate(self.ranges))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranges", ranges)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardLayout:
        """Return the layout of a rank that holds the whole tensor."""
        return cls(tuple(shape), _all_of(shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def is_whole(self) -> bool:
        """True if the local tensor is the whole one."""
        return self.ranges == _all_of(self.shape)

    def project(self, full: NDArray[Any]) -> NDArray[Any]:
        """Return the local part of a whole tensor, as a view where possible.

        Raises:
            ValueError: if the tensor has another shape than this layout's.
        """
        self._check(full.shape, self.shape, "the whole tensor")
        for dim, ranges in enumerate(self.ranges):
            lead = (slice(None),) * dim
            parts = [full[(*lead, slice(*found))] for found in ranges] or [full[(*lead, slice(0, 0))]]
            full = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)
        return full

    def gather(self, local: NDArray[Any], full: NDArray[Any]) -> None:
        """Write a local tensor to its place in the whole one.

        Raises:
            ValueError: if one of the two has another shape than this layout says.
        """
        self._check(full.shape, self.shape, "the whole tensor")
        self._check(local.shape, self.local_shape, "the local tensor")
        full[self._grid()] = local

    def indices(self) -> NDArray[np.int64]:
        """Return the flat index (C order) in the whole tensor of each element of the flattened local one:
        ``[local numel]``.
        """
        flat = np.zeros((), np.int64)
        for size, found in zip(self.shape, self.along(), strict=True):
            flat = flat[..., None] * size + found
        return flat.reshape(-1)

    def along(self) -> tuple[NDArray[np.int64], ...]:
        """Return the indices of each dimension of the whole tensor that lie on this rank, in local order."""
        return tuple(
            np.concatenate([np.zeros(0, np.int64), *(np.arange(*found) for found in ranges)])
            for ranges in self.ranges
        )

    def inside(self, outer: ShardLayout) -> ShardLayout:
        """Return this part of ``outer``'s local tensor as a part of ``outer``'s whole tensor.

        Raises:
            ValueError: if this layout's tensor and ``outer``'s local one differ in shape.
        """
        self._check(outer.local_shape, self.shape, "the local tensor of the outer layout")
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return ShardLayout(outer.shape, tuple(tuple(_composed(inner, around)) for inner, around in pairs))

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that :meth:`from_json` reads."""
        return {"shape": list(self.shape), "ranges": [[list(r) for r in found] for found in self.ranges]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLayout:
        """Rebuild a layout written by :meth:`to_json`."""
        ranges = tuple(tuple((int(start), int(stop)) for start, stop in found) for found in data["ranges"])
        return cls(tuple(int(size) for size in data["shape"]), ranges)

    def _grid(self) -> tuple[Any, ...]:
        if all(len(ranges) == 1 for ranges in self.ranges):
            return tuple(slice(*ranges[0]) for ranges in self.ranges)
        return np.ix_(*self.along())

    def _check(self, found: tuple[int, ...], expected: tuple[int, ...], what: str) -> None:
        if tuple(found) != expected:
            raise ValueError(
                f"{what} has the shape {list(found)}, but this shard layout is for one of {list(expected)}"
            )


def _all_of(shape: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
    return tuple(((0, int(size)),) if size else () for size in shape)


def _joined(ranges: Iterable[Range], dim: int, shape: tuple[int, ...]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in ((int(start), int(stop)) for start, stop in ranges):
        words = f"range {start}:{stop} of dimension {dim} of a tensor of shape {list(shape)}"
        if start >= stop:
            raise ValueError(f"{words} is empty; leave out what does not lie here")
        if start < 0 or stop > shape[dim]:
            raise ValueError(f"{words} leaves the tensor")
        if any(start < other_stop and other_start < stop for other_start, other_stop in joined):
            raise ValueError(f"{words} overlaps another one; every element lies at most once on a rank")
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


def _composed(inner: Iterable[Range], outer: Sequence[Range]) -> Iterable[Range]:
    """Yield ranges of local positions as ranges of the whole dimension."""
    starts = [0]
    for start, stop in outer:
        starts.append(starts[-1] + stop - start)
    for start, stop in inner:
        for (begin, _), first, last in zip(outer, starts, starts[1:], strict=False):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield begin + low - first, begin + high - first
