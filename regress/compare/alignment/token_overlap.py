"""Overlap of two token layouts: elements of two local tensors that are the same logical ones.

A local tensor of tokens is treated as rows of inner elements, one for each canonical token; the inner dimensions may be
a shard. The expected values of one side are put together from the other side's rows, block by block, so that no tensor
is ever copied as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.token_spans import PADDING
from regress.compare.verdicts.tensor_case import Block
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array
from regress.errors import CompareError
from regress.layout import ShardLayout

BLOCK = 1 << 22
"""Number of elements of a block, which is copied at once."""

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Part:
    """A local tensor as rows.

    Attributes:
        array: ``[R, ...inner]``; its flat order is that of the recorded tensor.
        rows: ``[R]`` which row of the whole each is, `PADDING` for none.
        inner: the part of a whole row that lies here.
        shape: shape of the recorded tensor.
    """

    array: Array
    rows: Index
    inner: ShardLayout
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of elements in a local row."""
        return math.prod(self.array.shape[1:])

    @property
    def row(self) -> int | None:
        """Number of elements in the last dimension, if there is one within a local row."""
        return self.array.shape[-1] if self.array.ndim > 1 and self.array.shape[-1] > 1 else None

    @cached_property
    def _places(self) -> Index:
        """Local place of each row of the whole, -1 for absent ones; the last entry is that of `PADDING`."""
        found = np.full(int(self.rows.max(initial=-1)) + 2, -1, np.int64)
        found[self.rows[::-1]] = np.arange(self.rows.size - 1, -1, -1)
        found[PADDING] = -1
        return found

    def find(self, rows: Index) -> Index:
        """Return the local places of rows, -1 for absent ones; of a row that lies here twice the first."""
        return self._places[np.minimum(rows, self._places.size - 1)]


def token_part(array: Array, layout: ShardLayout, canonical: Index, lead: int) -> Part:
    """Return a part made of a tensor whose first ``lead`` dimensions are places of tokens.

    Args:
        layout: layout of the array as a part of the microbatch's whole tensor.
        canonical: the token at each place of the whole tensor, flattened.

    Raises:
        CompareError: if the places are more or fewer than the tensor's.
    """
    places = layout.shape[:lead]
    if math.prod(places) != canonical.size:
        raise CompareError(f"{list(layout.shape)} has no place for {canonical.size} tokens")
    here = canonical
    if not layout.is_whole:
        here = ShardLayout(places, layout.ranges[:lead]).project(canonical.reshape(places)).reshape(-1)
    inner = ShardLayout(layout.shape[lead:], layout.ranges[lead:])
    return Part(array.reshape(here.size, *inner.local_shape), here, inner, array.shape)


def blocks(actual: Part, golden: Sequence[Part], selected: Index) -> Iterator[Block]:
    """Yield the elements of some local rows beside their golden values, in local order.

    Elements that no golden part has are left out; the proof of coverage reports them.

    Args:
        golden: the first that has an element gives its value.
        selected: local rows.
    """
    width = actual.width
    if not width:
        return
    step = max(BLOCK // width, 1)
    for start in range(0, selected.size, step):
        yield from _block(actual, golden, selected[start : start + step])


def _block(actual: Part, golden: Sequence[Part], local: Index) -> Iterator[Block]:
    rows = actual.rows[local]
    known = np.zeros(local.size, bool)
    for part in golden:
        if known.all():
            return
        found = part.find(rows)
        use = (found >= 0) & ~known
        if not use.any():
            continue
        if part.inner == actual.inner:
            known |= use
            yield from _same_rows(actual, part, local[use], found[use])
        else:
            yield from _assembled(actual, golden, local[use])
            known |= use


def _same_rows(actual: Part, golden: Part, actual_index: Index, golden_index: Index) -> Iterator[Block]:
    """Yield blocks of rows with the same inner elements on both sides: views where rows are contiguous."""
    width = actual.width
    a, g = _taken(actual.array, actual_index), _taken(golden.array, golden_index)
    run = _run(actual_index)
    start = actual_index if run is None else run * width
    yield Block(a.reshape(-1), g.reshape(-1), start, actual.row, width)


def _assembled(actual: Part, golden: Sequence[Part], actual_index: Index) -> Iterator[Block]:
    """Yield blocks of rows whose inner elements lie in several golden parts."""
    rows = actual.rows[actual_index]
    along = actual.inner.along()
    expected: Array | None = None
    known = np.zeros((actual_index.size, *actual.array.shape[1:]), bool)
    for part in golden:
        found = part.find(rows)
        here = np.flatnonzero(found >= 0)
        common = [
            np.intersect1d(a, b, assume_unique=True, return_indices=True)[1:]
            for a, b in zip(along, part.inner.along(), strict=True)
        ]
        if not here.size or any(not mine.size for mine, _ in common):
            continue
        if expected is None:
            expected = np.zeros(known.shape, part.array.dtype)
        into = np.ix_(here, *(mine for mine, _ in common))
        values = part.array[np.ix_(found[here], *(other for _, other in common))]
        release(part.array[int(found[here].min()) : int(found[here].max()) + 1])
        expected[into] = np.where(known[into], expected[into], values.astype(expected.dtype, copy=False))
        known[into] = True
    if expected is None:
        return
    width = actual.width
    a, use = _taken(actual.array, actual_index).reshape(-1), known.reshape(-1)
    if use.all():
        yield Block(a, expected.reshape(-1), actual_index, actual.row, width)
    elif use.any():
        flat = (actual_index[:, None] * width + np.arange(width)).reshape(-1)
        yield Block(a[use], expected.reshape(-1)[use], flat[use])


def _taken(array: Array, rows: Index) -> Array:
    """Return some rows of an array: a view where they are contiguous."""
    start = _run(rows)
    if start is not None:
        return array[start : start + rows.size]
    copy = array[rows]
    release(array[int(rows.min()) : int(rows.max()) + 1])
    return copy


def _run(rows: Index) -> int | None:
    """Return the first of contiguous rows; None for others."""
    first = int(rows[0])
    return first if int(rows[-1]) - first == rows.size - 1 and bool((np.diff(rows) == 1).all()) else None
