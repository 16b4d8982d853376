"""Elements of a tensor that no rank holds, and those that several ranks hold."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from regress.compare.alignment.local_shard import Shard, uncovered
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.shard_overlap import assembled, equal_elements, pairs, shard_blocks, words_of
from regress.errors import CompareError
from regress.layout import ShardLayout


@st.composite
def ranges_of(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=5)))
    found = [(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
    return tuple(draw(st.permutations(found)))


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ShardLayout]]:
    """Some parts of a tensor, overlapping or not."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    one = st.builds(ShardLayout, st.just(shape), st.tuples(*(ranges_of(size) for size in shape)))
    return shape, draw(st.lists(one | st.just(ShardLayout.whole(shape)), max_size=4))


def held(layouts: list[ShardLayout], values: NDArray[Any]) -> list[Shard]:
    return [
        Shard(
            np.ascontiguousarray(layout.project(values)).reshape(layout.local_shape),
            layout,
            Key("param", rank, None),
        )
        for rank, layout in enumerate(layouts)
    ]


@settings(deadline=None)
@given(shards())
def test_what_lies_nowhere_is_counted_and_the_first_named(
    given_shards: tuple[tuple[int, ...], list[ShardLayout]],
) -> None:
    shape, layouts = given_shards
    times = np.zeros(math.prod(shape), np.int64)
    for layout in layouts:
        times[layout.indices()] += 1
    free = np.flatnonzero(times == 0)
    assert uncovered(shape, layouts) == ((len(free), int(free[0])) if len(free) else None)


@settings(deadline=None)
@given(shards())
def test_every_element_of_several_ranks_is_compared(
    given_shards: tuple[tuple[int, ...], list[ShardLayout]],
) -> None:
    """Whichever value is changed on one rank, an overlap shows it, if another rank has the element."""
    shape, layouts = given_shards
    values = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    parts = held(layouts, values)
    assert None not in [equal_elements(*pair) for pair in pairs(parts)]
    for rank, part in enumerate(parts):
        for index, element in enumerate(part.layout.indices()):
            holders = [r for r, other in enumerate(parts) if element in other.layout.indices()]
            changed = part.array.copy()
            changed.reshape(-1)[index] += 0.5
            mixed = [*parts[:rank], Shard(changed, part.layout, part.key), *parts[rank + 1 :]]
            found = [(one, other) for one, other in pairs(mixed) if equal_elements(one, other) is None]
            assert bool(found) == (len(holders) > 1)
            for one, other in found:
                assert part.key in (one.key, other.key)
                wrong = [
                    words_of(other.layout, str)(block.index(int(i)))
                    for block in shard_blocks(other, [one])
                    for i in np.flatnonzero(block.actual != block.golden)
                ]
                assert wrong == [str(element)]


@settings(deadline=None)
@given(shards())
def test_parts_are_put_together_if_all_are_there(
    given_shards: tuple[tuple[int, ...], list[ShardLayout]],
) -> None:
    shape, layouts = given_shards
    values = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    if not layouts:
        return
    if uncovered(shape, layouts) is None:
        np.testing.assert_array_equal(assembled(held(layouts, values), "w"), values, strict=True)
    else:
        with pytest.raises(CompareError, match=r"of w in param of rank 0 is held by no rank|^w in param"):
            assembled(held(layouts, values), "w")


def test_the_odd_one_of_three_is_named() -> None:
    values = np.arange(3.0)
    parts = held([ShardLayout.whole((3,))] * 3, values)
    parts[0] = Shard(values + 1, parts[0].layout, parts[0].key)
    (found,) = [pair for pair in pairs(parts) if equal_elements(*pair) is None]
    assert [shard.key.rank for shard in found] == [1, 0]
