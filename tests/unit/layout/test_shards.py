"""Shard layouts say which elements of a whole tensor lie on a rank, and nothing else."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from regress.layout import ShardLayout


@st.composite
def ranges_of(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    """Some disjoint ranges of a dimension, in any order."""
    cuts = draw(st.lists(st.integers(0, size), max_size=6, unique=True).map(sorted))
    found = [(start, stop) for start, stop in pairwise(cuts) if draw(st.booleans())]
    return tuple(draw(st.permutations(found)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> ShardLayout:
    sizes = shape if shape is not None else tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    return ShardLayout(sizes, tuple(draw(ranges_of(size)) for size in sizes))


def picked(layout: ShardLayout, full: NDArray[Any]) -> NDArray[Any]:
    """The local tensor as its definition has it."""
    along = [np.array([i for r in ranges for i in range(*r)], np.int64) for ranges in layout.ranges]
    return full[np.ix_(*along)] if along else full


def numbered(shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(int(np.prod(shape))).reshape(shape)


@settings(deadline=None)
@given(layouts())
def test_a_local_tensor_is_what_the_ranges_pick(layout: ShardLayout) -> None:
    full = numbered(layout.shape)
    local = layout.project(full)
    np.testing.assert_array_equal(local, picked(layout, full), strict=True)
    assert local.shape == layout.local_shape
    np.testing.assert_array_equal(layout.indices(), local.reshape(-1), strict=True)


@settings(deadline=None)
@given(layouts())
def test_gathering_writes_each_element_to_its_place_and_no_other(layout: ShardLayout) -> None:
    full = numbered(layout.shape)
    back = np.full(layout.shape, -1)
    layout.gather(layout.project(full), back)
    here = np.isin(full, layout.indices())
    np.testing.assert_array_equal(back, np.where(here, full, -1))


@settings(deadline=None)
@given(st.data())
def test_a_shard_of_a_shard_is_a_shard_of_the_whole(data: st.DataObject) -> None:
    outer = data.draw(layouts())
    inner = data.draw(layouts(outer.local_shape))
    full = numbered(outer.shape)
    np.testing.assert_array_equal(
        inner.inside(outer).project(full), inner.project(outer.project(full)), strict=True
    )


@settings(deadline=None)
@given(layouts())
def test_layouts_are_equal_when_they_hold_the_same_elements(layout: ShardLayout) -> None:
    single = tuple(tuple((i, i + 1) for r in ranges for i in range(*r)) for ranges in layout.ranges)
    assert ShardLayout(layout.shape, single) == layout
    assert ShardLayout.whole(layout.local_shape).inside(layout) == layout
    assert layout.inside(ShardLayout.whole(layout.shape)) == layout


@settings(deadline=None)
@given(layouts())
def test_json_round_trip(layout: ShardLayout) -> None:
    assert ShardLayout.from_json(layout.to_json()) == layout


@settings(deadline=None)
@given(layouts())
def test_whole_is_all_elements_in_order(layout: ShardLayout) -> None:
    assert ShardLayout.whole(layout.shape).is_whole
    dims = zip(layout.ranges, layout.shape, strict=True)
    complete = all([i for r in ranges for i in range(*r)] == list(range(size)) for ranges, size in dims)
    assert layout.is_whole == complete


def test_a_fused_weight_has_several_ranges() -> None:
    """Rank 1 of 2 of a fused query, key and value of 4, 2 and 2 rows."""
    qkv = ShardLayout((8, 3), (((2, 4), (5, 6), (7, 8)), ((0, 3),)))
    assert qkv.local_shape == (4, 3)
    assert qkv.project(numbered((8, 3)))[:, 0].tolist() == [6, 9, 15, 21]
    half = ShardLayout((4, 3), (((2, 4),), ((0, 3),)))
    assert half.inside(qkv).ranges == (((5, 6), (7, 8)), ((0, 3),))


def test_a_number_is_whole() -> None:
    scalar = ShardLayout.whole(())
    assert scalar.is_whole
    assert scalar.local_shape == ()
    assert scalar.indices().tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "ranges", "message"),
    [
        ((4, 2), (((0, 2),),), "ranges are given for 1 dimensions of a tensor of shape [4, 2]"),
        ((4,), (((2, 2),),), "range 2:2 of dimension 0 of a tensor of shape [4] is empty; leave out"),
        ((4,), (((2, 5),),), "range 2:5 of dimension 0 of a tensor of shape [4] leaves the tensor"),
        ((4,), (((-1, 2),),), "range -1:2 of dimension 0 of a tensor of shape [4] leaves the tensor"),
        (
            (4, 4),
            (((0, 4),), ((2, 4), (0, 3))),
            "range 0:3 of dimension 1 of a tensor of shape [4, 4] overlaps",
        ),
        ((-1,), ((),), "the shape [-1] of a whole tensor has a negative size"),
    ],
)
def test_impossible_layouts_are_refused(
    shape: tuple[int, ...], ranges: tuple[tuple[tuple[int, int], ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=r"tensor of shape|whole tensor") as caught:
        ShardLayout(shape, ranges)
    assert message in str(caught.value)


def test_tensors_of_another_shape_are_refused() -> None:
    layout = ShardLayout((4, 2), (((0, 2),), ((0, 2),)))
    with pytest.raises(ValueError, match=r"the whole tensor has the shape \[2, 4\], but this shard layout"):
        layout.project(numbered((2, 4)))
    with pytest.raises(ValueError, match=r"the local tensor has the shape \[4, 2\].*for one of \[2, 2\]"):
        layout.gather(numbered((4, 2)), numbered((4, 2)))
    with pytest.raises(ValueError, match=r"the local tensor of the outer layout has the shape \[2, 2\]"):
        layout.inside(layout)
