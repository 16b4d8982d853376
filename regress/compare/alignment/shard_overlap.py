"""Overlap of the shards of two sides: the elements of a whole tensor that both hold, piece by piece.

A shard is a box of the whole tensor, or several boxes where a weight is fused. Only ranges are computed with, never the
indices of elements, so a tensor may have any size; parts of several shards are put together block by block.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np

from regress.compare.alignment.local_shard import Shard, flat_index, others, uncovered
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.token_overlap import BLOCK
from regress.compare.verdicts.tensor_case import Block, Locate, element, unravelled
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array, raw
from regress.errors import CompareError
from regress.layout import Range, ShardLayout

_PIECE = 1 << 22  # bytes that are compared at once

Run = tuple[int, int, int]
"""``(start, stop, at)``: indices ``start:stop`` of a whole dimension lie at ``at`` and after it in a local one."""


class IntervalIndex:
    """Layouts of one tensor, indexed by interval, so that only nearby shards are examined."""

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        self._layouts = layouts
        dims = range(len(layouts[0].shape)) if layouts else range(0)
        self._dim = max(dims, key=lambda dim: len({layout.ranges[dim] for layout in layouts}), default=None)
        self._found: list[tuple[int, int, int]] = []
        if self._dim is not None:
            found = enumerate(layout.ranges[self._dim] for layout in layouts)
            self._found = sorted((start, stop, i) for i, ranges in found for start, stop in ranges)
        self._starts = [start for start, _, _ in self._found]
        self._reach = max((stop - start for start, stop, _ in self._found), default=0)

    def of(self, ranges: Sequence[Sequence[Range]]) -> list[int]:
        """Return the layouts that hold an element of these ranges, one list for each dimension, in their own order."""
        if self._dim is None:
            return [*range(len(self._layouts))]
        near = set()
        for low, high in ranges[self._dim]:
            first = bisect_left(self._starts, low - self._reach + 1)
            last = bisect_left(self._starts, high)
            near |= {i for _, stop, i in self._found[first:last] if stop > low}
        return [i for i in sorted(near) if _meet(self._layouts[i].ranges, ranges)]


def _meet(one: Sequence[Sequence[Range]], other: Sequence[Sequence[Range]]) -> bool:
    return all(
        any(a < d and c < b for a, b in mine for c, d in theirs)
        for mine, theirs in zip(one, other, strict=True)
    )


def shard_blocks(actual: Shard, golden: Sequence[Shard], limit: int = BLOCK) -> Iterator[Block]:
    """Yield the elements of a shard beside their golden values, in local order.

    Elements that no golden shard has are left out; the proof of coverage reports them.

    Args:
        golden: the first that has an element gives its value.
        limit: elements that are put together at once.
    """
    shape = actual.array.shape
    row = shape[-1] if len(shape) > 1 and 1 < shape[-1] <= limit else None  # longer ones are cut
    if golden and golden[0].layout == actual.layout:
        yield Block(actual.array.reshape(-1), golden[0].array.reshape(-1), 0, row)
        return
    near = IntervalIndex([shard.layout for shard in golden])
    for start, box in _boxes(shape, limit):
        part = actual.array[box].reshape(-1)
        runs = [_runs(ranges, cut) for ranges, cut in zip(actual.layout.ranges, box, strict=True)]
        found = [golden[i] for i in near.of([[(a, b) for a, b, _ in dim] for dim in runs])]
        expected, known = _expected(tuple(cut.stop - cut.start for cut in box), runs, found)
        if known is None:
            yield Block(part, expected.reshape(-1), start, row)
        elif known.any():
            use = np.flatnonzero(known)
            yield Block(part[use], expected.reshape(-1)[use], start + use)
        for array in (part, expected):
            release(array)


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Yield boxes that cover a tensor in C order, each with the flat index of its first element."""
    if not math.prod(shape):
        return
    axis = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= limit), 0)
    inner = math.prod(shape[axis + 1 :])
    rest = tuple(slice(0, size) for size in shape[axis + 1 :])
    step, length = (max(limit // inner, 1), shape[axis]) if shape else (1, 1)
    for number, lead in enumerate(np.ndindex(*shape[:axis])):
        for start in range(0, length, step):
            cut = (slice(start, min(start + step, length)),) if shape else ()
            yield (number * length + start) * inner, (*(slice(i, i + 1) for i in lead), *cut, *rest)


def _runs(ranges: Sequence[Range], cut: slice = slice(0, 1 << 62)) -> list[Run]:
    """Return ranges as runs of local positions inside ``cut``, counted from its start."""
    found, at = [], 0
    for start, stop in ranges:
        low, high = max(at, cut.start), min(at + stop - start, cut.stop)
        if low < high:
            found.append((start + low - at, start + high - at, low - cut.start))
        at += stop - start
    return found


def _expected(
    shape: tuple[int, ...], runs: Sequence[Sequence[Run]], golden: Sequence[Shard]
) -> tuple[Array, Array | None]:
    """Return golden values of a box, and a mask ``[elements]`` of those that are known; None if all are."""
    expected: Array | None = None
    known = np.zeros(shape, bool)
    for shard in golden:
        dims = [_common(mine, _runs(theirs)) for mine, theirs in zip(runs, shard.layout.ranges, strict=True)]
        for pieces in product(*dims):
            into, of = tuple(here for here, _ in pieces), tuple(there for _, there in pieces)
            source = shard.array[of]
            if expected is None and source.shape == shape:
                return source, None
            if expected is None:
                expected = np.zeros(shape, shard.array.dtype)
            expected[into] = np.where(known[into], expected[into], source) if known[into].any() else source
            known[into] = True
            release(source)
    if expected is None:
        return np.zeros(shape, bool), known.reshape(-1)
    return expected, None if known.all() else known.reshape(-1)


def _common(mine: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[slice, slice]]:
    """Return the intersections of two lists of runs, as slices of the one and of the other local dimension."""
    found = []
    for start, stop, at in mine:
        for first, last, there in theirs:
            low, high = max(start, first), min(stop, last)
            if low < high:
                here = slice(at + low - start, at + high - start)
                found.append((here, slice(there + low - first, there + high - first)))
    return found


def pairs(parts: Sequence[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Yield pairs of shards with common elements: the fewest comparisons that show every difference.

    Each rank is compared with the most common values among ranks with the same shard (the first in a tie), and one of
    these ranks with one of every other shard. The first of a pair is the one that is compared with.
    """
    alike: dict[ShardLayout, list[Shard]] = {}
    for part in parts:
        alike.setdefault(part.layout, []).append(part)
    chosen = [_most_common(same) for same in alike.values()]
    for one, same in zip(chosen, alike.values(), strict=True):
        yield from ((one, other) for other in same if other is not one)
    for one, other in combinations(chosen, 2):
        if _meet(one.layout.ranges, other.layout.ranges):
            yield one, other


def _most_common(same: Sequence[Shard]) -> Shard:
    if len(same) < 3:
        return same[0]
    groups: dict[bytes, list[Shard]] = {}
    for part in same:
        groups.setdefault(bytes(raw(part.array)), []).append(part)
    return max(groups.values(), key=len)[0]


def equal_elements(one: Shard, other: Shard) -> int | None:
    """Return the number of elements that two shards have in common; None if dtypes or bytes of them differ."""
    count = 0
    for block in shard_blocks(other, [one]):
        if one.array.dtype != other.array.dtype or not _same_bytes(block.actual, block.golden):
            return None
        count += block.actual.size
    return count


def _same_bytes(one: Array, other: Array) -> bool:
    mine, theirs = raw(np.ascontiguousarray(one)), raw(np.ascontiguousarray(other))
    starts = range(0, len(mine), _PIECE)
    same = all(mine[start : start + _PIECE] == theirs[start : start + _PIECE] for start in starts)
    for array in (one, other):
        release(array)
    return same


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
    for one, other in pairs(parts):
        if equal_elements(one, other) is None:
            raise two_values(name, other.key)
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


def words_of(shard: ShardLayout, whole: Locate) -> Locate:
    """Return words for the elements of a shard, given those for the elements of the whole tensor."""
    if shard.is_whole:
        return whole

    def words(index: int) -> str:
        local = zip(shard.ranges, unravelled(index, shard.local_shape), strict=True)
        return whole(flat_index([_at(ranges, i) for ranges, i in local], shard.shape))

    return words


def _at(ranges: Sequence[Range], local: int) -> int:
    """Return the index in the whole dimension of a local index."""
    for start, stop in ranges:
        if local < stop - start:
            return start + local
        local -= stop - start
    raise IndexError(f"{local} lies beyond what is held of the dimension")
