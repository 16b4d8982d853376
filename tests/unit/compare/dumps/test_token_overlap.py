"""Two ways to cut a tensor: the pieces hold every common element once, beside its own value."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.alignment.local_shard import Shard
from regress.compare.alignment.shard_overlap import shard_blocks
from regress.compare.alignment.token_overlap import Part, blocks, token_part
from regress.layout import ShardLayout

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], parts: int = 3) -> list[ShardLayout]:
    """A tensor cut into boxes along one dimension, which may be fused from two ranges."""
    dim = draw(st.integers(0, len(shape) - 1))
    owner = draw(st.lists(st.integers(0, parts - 1), min_size=shape[dim], max_size=shape[dim]))
    found = []
    for part in range(parts):
        ranges: list[Any] = [((0, size),) for size in shape]
        ranges[dim] = tuple((i, i + 1) for i, rank in enumerate(owner) if rank == part)
        found.append(ShardLayout(shape, tuple(ranges)))
    return found


@settings(deadline=None)
@given(st.data(), shapes, st.sampled_from([1, 3, 1 << 20]))
def test_any_two_cuts_of_a_tensor(data: st.DataObject, shape: tuple[int, ...], block: int) -> None:
    whole = np.arange(float(np.prod(shape))).reshape(shape)
    ours, theirs = data.draw(cuts(shape)), data.draw(cuts(shape))
    golden = [Shard(np.ascontiguousarray(layout.project(whole)), layout) for layout in ours]
    seen: list[float] = []
    for layout in theirs:
        local = np.ascontiguousarray(layout.project(whole))
        for found in shard_blocks(Shard(local, layout), golden, block):
            np.testing.assert_array_equal(found.actual, found.golden)
            flat = [local.reshape(-1)[found.index(i)] for i in range(found.actual.size)]
            np.testing.assert_array_equal(flat, found.actual)
            assert found.row is None or (found.actual.size % found.row, found.index(0) % found.row) == (0, 0)
            seen += found.actual.tolist()
    assert sorted(seen) == whole.reshape(-1).tolist()


@settings(deadline=None)
@given(st.permutations(range(12)), st.integers(1, 11), st.integers(1, 4))
def test_tokens_in_any_order_over_any_records(order: list[int], cut: int, width: int) -> None:
    values = np.arange(12.0 * width).reshape(12, width)
    layout = ShardLayout.whole((12, width))
    part = token_part(values[order], layout, np.array(order), 1)
    golden = [
        Part(values[rows], np.array(rows), part.inner, (len(rows), width))
        for rows in ([*range(cut)], [*range(cut, 12)])
    ]
    found = [*blocks(part, golden, np.arange(12))]
    assert sum(block.actual.size for block in found) == values.size
    for block in found:
        np.testing.assert_array_equal(block.actual, block.golden)


def test_what_the_golden_side_lacks_is_left_out() -> None:
    layout = ShardLayout.whole((4, 2))
    part = token_part(np.ones((4, 2)), layout, np.array([0, 1, -1, 3]), 1)
    golden = Part(np.ones((2, 2)), np.array([3, 9]), part.inner, (2, 2))
    (block,) = blocks(part, [golden], np.flatnonzero(part.rows >= 0))
    assert (block.actual.size, block.index(0)) == (2, 6)
