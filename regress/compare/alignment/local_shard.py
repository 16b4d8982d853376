"""Parts of one tensor held by several ranks: elements on no rank, and elements with different values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key
from regress.compare.verdicts.case import element
from regress.dump.arrays import Array, raw
from regress.dump.mapped import release
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

_PIECE = 1 << 22  # bytes that are compared at once


NOWHERE = Key("", None, None)


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor, the part of the whole that it is, and the place of its record where one matters."""

    array: Array
    layout: ShardLayout
    key: Key = NOWHERE


@dataclass(frozen=True)
class Overlap:
    """Elements that two ranks hold, as each of them has them.

    Attributes:
        shape: shape of the whole tensor; ``along`` are indices in it, dimension by dimension.
        one, other: the two keys; ``first`` and ``second`` their values of these elements.
    """

    one: Key
    other: Key
    first: Array
    second: Array
    shape: tuple[int, ...]
    along: tuple[NDArray[np.int64], ...]

    @property
    def equal(self) -> bool:
        """True if dtypes and bytes are the same."""
        if self.first.dtype != self.second.dtype:
            return False
        mine, theirs = (raw(array) for array in (self.first, self.second))
        same = all(
            mine[start : start + _PIECE] == theirs[start : start + _PIECE]
            for start in range(0, len(mine), _PIECE)
        )
        for array in (self.first, self.second):
            release(array)
        return same

    def whole_index(self, index: int) -> int:
        """Return the flat index in the whole tensor of an element of this overlap."""
        local = np.unravel_index(index, self.first.shape)
        return flat_index([int(known[i]) for known, i in zip(self.along, local, strict=True)], self.shape)


whole_layout = lru_cache(maxsize=1024)(ShardLayout.whole)
"""The layout of a whole tensor of a shape."""


def local_shard(key: Key, record: Record, name: str) -> Shard:
    """Return a tensor of a record as a shard; it is whole unless ``meta["shards"]`` says otherwise.

    Raises:
        CompareError: if the entry is no shard layout, or not one of this local tensor.
    """
    array = record.tensors[name]
    shards: Any = record.meta.get("shards") or {}
    if name not in shards:
        return Shard(array, whole_layout(array.shape), key)
    try:
        layout = ShardLayout.from_json(shards[name])
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(
            f"{name} in {key} has no usable shard layout ({type(error).__name__}: {error}); write "
            'ShardLayout.to_json() into meta["shards"]'
        ) from None
    if layout.local_shape != array.shape:
        raise CompareError(
            f"{name} in {key} has the shape {list(array.shape)}, but its shard layout is that of a part of the shape "
            f"{list(layout.local_shape)}"
        )
    return Shard(array, layout, key)


def flat_index(place: Sequence[int], shape: tuple[int, ...]) -> int:
    """Return the flat index of an element; a tensor without dimensions has one, 0."""
    return int(np.ravel_multi_index(tuple(place), shape)) if shape else 0


def uncovered(shape: tuple[int, ...], layouts: Iterable[ShardLayout]) -> tuple[int, int] | None:
    """Count the elements of a tensor that lie in none of the layouts; return the count and the first flat index.

    Return None if every element lies in some layout.

    The tensor is cut at the edges of all ranges; no array of its size is made.
    """
    known = set(layouts)
    if any(layout.is_whole for layout in known):
        return None
    cuts = [
        sorted({0, size, *(edge for layout in known for found in layout.ranges[dim] for edge in found)})
        for dim, size in enumerate(shape)
    ]
    free = np.ones([len(edges) - 1 for edges in cuts], bool)
    for layout in known:
        cells = [
            [c for start, stop in ranges for c in range(bisect_left(edges, start), bisect_left(edges, stop))]
            for edges, ranges in zip(cuts, layout.ranges, strict=True)
        ]
        free[np.ix_(*(np.array(found, np.int64) for found in cells))] = False
    found = np.argwhere(free)
    if not len(found):
        return None
    widths = [np.diff(edges)[found[:, dim]] for dim, edges in enumerate(cuts)]
    count = int(np.prod(widths, axis=0).sum()) if widths else 1
    first = [edges[cell] for edges, cell in zip(cuts, found[0], strict=True)]
    return count, flat_index(first, shape)


def overlaps(parts: Sequence[Shard]) -> Iterator[Overlap]:
    """Yield the elements that ranks hold in common, in the fewest comparisons that show every difference.

    Each rank is compared with the most common values among ranks with the same shard (the first in a tie), and one of
    these ranks with one of every other shard.
    """
    alike: dict[ShardLayout, list[Shard]] = {}
    for part in parts:
        alike.setdefault(part.layout, []).append(part)
    chosen = []
    for layout, same in alike.items():
        one = _most_common(same)
        chosen.append(one)
        along = layout.along()
        for other in same:
            if other is not one:
                yield Overlap(one.key, other.key, one.array, other.array, layout.shape, along)
    for i, one in enumerate(chosen):
        for other in chosen[i + 1 :]:
            yield from _common(one, other)


def _most_common(same: Sequence[Shard]) -> Shard:
    if len(same) < 3:
        return same[0]
    groups: dict[bytes, list[Shard]] = {}
    for part in same:
        groups.setdefault(bytes(raw(part.array)), []).append(part)
    return max(groups.values(), key=len)[0]


def _common(one: Shard, other: Shard) -> Iterator[Overlap]:
    along, mine, theirs = [], [], []
    for a, b in zip(one.layout.along(), other.layout.along(), strict=True):
        found, i, j = np.intersect1d(a, b, assume_unique=True, return_indices=True)
        if not len(found):
            return
        along.append(found)
        mine.append(i)
        theirs.append(j)
    first, second = one.array[np.ix_(*mine)], other.array[np.ix_(*theirs)]
    yield Overlap(one.key, other.key, first, second, one.layout.shape, tuple(along))


def assembled(parts: Sequence[Shard], name: str) -> Array:
    """Return the whole tensor, put together from its shards.

    Raises:
        CompareError: if ranks disagree about its shape or an element of it, or an element is on no rank.
    """
    first = parts[0]
    shape = first.layout.shape
    for part in parts:
        if part.layout.shape != shape or part.array.dtype != first.array.dtype:
            raise two_values(name, part.key)
    for overlap in overlaps(parts):
        if not overlap.equal:
            raise two_values(name, overlap.other)
    missing = uncovered(shape, (part.layout for part in parts))
    if missing is not None:
        count, index = missing
        where = element(index, shape, name)
        raise CompareError(f"{where} in {first.key} is held by no rank{others(count)}")
    if first.layout.is_whole:
        return first.array
    whole = np.empty(shape, first.array.dtype)
    for part in parts:
        part.layout.gather(part.array, whole)
    return whole


def two_values(name: str, key: Key) -> CompareError:
    """Return the error for ranks that disagree."""
    return CompareError(f"{name} in {key} differs from that of another rank, so it has no one value")


def others(count: int) -> str:
    """Return text such as `` (and 3 other elements)``; empty for a single element."""
    return "" if count < 2 else f" (and {count - 1} other element{'s' if count > 2 else ''})"
