"""Layouts of microbatches against lists of lists: which sample lies where, in rows of which length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regress.layout import BatchPlan, TokenLayout
from regress.layout.canonical_frame import TokenFrame
from regress.layout.layout_planner import plan_microbatches
from regress.layout.token_layout import PADDING, Segment, offsets_of
from tests.as_subtests import as_subtests

LENGTHS = [3, 7, 1, 4, 7, 2, 5]
ORDERS = {
    "given": [0, 1, 2, 3, 4, 5, 6],
    "reversed": [6, 5, 4, 3, 2, 1, 0],
    "longest_first": [1, 4, 6, 3, 0, 5, 2],
    "shortest_first": [2, 5, 0, 3, 6, 1, 4],
}


def row_length(tokens: int, plan: BatchPlan) -> int:
    length = max(tokens, plan.pad_to_length or 0)
    while length % plan.pad_to_multiple_of:
        length += 1
    return length


def table(group: list[int], plan: BatchPlan) -> list[list[tuple[int, int]]]:
    """Sample and position at each place of a microbatch."""
    tokens = [[(sample, position) for position in range(LENGTHS[sample])] for sample in group]
    if plan.layout == "packed":
        tokens = [[one for row in tokens for one in row]]
    width = row_length(max(map(len, tokens)), plan)
    fill = [[(PADDING, PADDING)] * (width - len(row)) for row in tokens]
    pairs = zip(tokens, fill, strict=True)
    if plan.padding_side == "left" and plan.layout == "padded":
        return [padding + row for row, padding in pairs]
    return [row + padding for row, padding in pairs]


def groups(plan: BatchPlan) -> list[list[int]]:
    order = ORDERS[plan.row_order]
    if plan.max_tokens_per_microbatch is None:
        size = plan.micro_batch_size or len(order)
        return [order[start : start + size] for start in range(0, len(order), size)]
    found: list[list[int]] = []
    for sample in order:
        more = [*found[-1], sample] if found else [sample]
        rows = table(more, plan)
        if found and len(rows) * len(rows[0]) <= plan.max_tokens_per_microbatch:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


@as_subtests("order", list(ORDERS))
@as_subtests(
    "size", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_microbatch": 16}]
)
@as_subtests("padding", [{}, {"pad_to_multiple_of": 4}, {"pad_to_length": 9, "pad_to_multiple_of": 2}])
@as_subtests("layout", [{}, {"padding_side": "left"}, {"layout": "packed"}])
def test_plans(layout: dict[str, Any], padding: dict[str, Any], size: dict[str, Any], order: str) -> None:
    plan = BatchPlan(row_order=order, **layout, **padding, **size)
    wanted = [table(group, plan) for group in groups(plan)]
    found = plan_microbatches(LENGTHS, plan)
    assert [one.shape for one in found] == [(len(rows), len(rows[0])) for rows in wanted]
    for one, rows in zip(found, wanted, strict=True):
        assert one.sample_ids.tolist() == [[sample for sample, _ in row] for row in rows]
        assert one.positions.tolist() == [[position for _, position in row] for row in rows]
        assert one.position_ids.tolist() == [[max(position, 0) for _, position in row] for row in rows]
        assert one.attention_mask.tolist() == [[sample != PADDING for sample, _ in row] for row in rows]
        assert one.num_tokens == sum(sample != PADDING for row in rows for sample, _ in row)
        assert TokenLayout.from_json(one.to_json()) == one


def test_a_budget_that_is_met_exactly_is_no_excess() -> None:
    assert len(plan_microbatches([4, 4], BatchPlan(max_tokens_per_microbatch=8))) == 1
    assert len(plan_microbatches([4, 4], BatchPlan(max_tokens_per_microbatch=7))) == 2
    assert len(plan_microbatches([4], BatchPlan(max_tokens_per_microbatch=4))) == 1
    assert len(plan_microbatches([1, 1], BatchPlan(max_tokens_per_microbatch=2))) == 1
    with pytest.raises(ValueError, match="sample 1 takes 5 tokens but max_tokens_per_microbatch is 4"):
        plan_microbatches([4, 5], BatchPlan(max_tokens_per_microbatch=4))


@pytest.mark.parametrize("wrong", [[], [3, 0]])
def test_samples_without_tokens_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="every sample needs at least one token"):
        plan_microbatches(wrong, BatchPlan())
    assert len(plan_microbatches([1], BatchPlan())) == 1


PARTS = TokenLayout((2, 6), (Segment(1, 2, 5, 0, 1), Segment(0, 0, 2, 1, 0), Segment(2, 1, 4, 1, 3)))
"""Parts of samples, as ranks hold them, with places between them."""


def test_values_go_to_their_places_and_back() -> None:
    assert PARTS.num_tokens == 8
    assert PARTS.positions.tolist() == [[-1, 2, 3, 4, -1, -1], [0, 1, -1, 1, 2, 3]]
    assert PARTS.sample_ids.tolist() == [[-1, 1, 1, 1, -1, -1], [0, 0, -1, 2, 2, 2]]
    offsets = offsets_of([3, 5, 4])
    assert offsets.tolist() == [0, 3, 8, 12]
    flat = np.arange(12) + 100
    local = [[-7, 105, 106, 107, -7, -7], [100, 101, -7, 109, 110, 111]]
    assert PARTS.scatter(flat, offsets, -7).tolist() == local
    assert PARTS.scatter(flat, offsets).tolist() == [[max(value, 0) for value in row] for row in local]
    canonical, index = PARTS.indices(offsets)
    assert (canonical.tolist(), index.tolist()) == ([5, 6, 7, 0, 1, 9, 10, 11], [1, 2, 3, 6, 7, 9, 10, 11])
    back = np.zeros(12, dtype=np.int64)
    PARTS.gather(np.array(local), back, offsets)
    held = [0, 1, 5, 6, 7, 9, 10, 11]
    assert back.tolist() == [flat[k] if k in held else 0 for k in range(12)]
    empty = TokenLayout((1, 3), ())
    assert [one.tolist() for one in empty.indices(offsets)] == [[], []]
    assert empty.num_tokens == 0


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([Segment(0, 2, 2, 0, 0)], "empty or negative"),
        ([Segment(-1, 0, 2, 0, 0)], "empty or negative"),
        ([Segment(0, -1, 1, 0, 0)], "empty or negative"),
        ([Segment(0, 0, 2, 2, 0)], "leaves the local tensor"),
        ([Segment(0, 0, 2, -1, 0)], "leaves the local tensor"),
        ([Segment(0, 0, 2, 0, -1)], "leaves the local tensor"),
        ([Segment(0, 0, 2, 0, 3)], "leaves the local tensor"),
        ([Segment(0, 0, 2, 0, 0), Segment(1, 0, 2, 0, 1)], "overlaps"),
    ],
)
def test_segments_that_cannot_lie_there(segments: list[Segment], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenLayout((2, 4), tuple(segments))


def test_segments_that_just_fit() -> None:
    fitting = TokenLayout((2, 4), (Segment(0, 0, 2, 0, 0), Segment(1, 0, 2, 0, 2), Segment(2, 0, 1, 1, 3)))
    assert fitting.sample_ids.tolist() == [[0, 0, 1, 1], [PADDING] * 3 + [2]]


FRAME = TokenFrame(tuple(("g", number) for number in range(5)), (3, 1, 4, 2, 6))


def test_places_in_a_frame() -> None:
    flat = [(FRAME.samples[s], p) for s, length in enumerate(FRAME.lengths) for p in range(length)]
    assert [FRAME.locate(index) for index in range(FRAME.size)] == flat
    assert FRAME.size == 16
    assert FRAME.offsets.tolist() == [0, 3, 4, 8, 10, 16]
    assert FRAME.index == {("g", number): number for number in range(5)}
    assert FRAME.select([4, 0]) == TokenFrame((("g", 4), ("g", 0)), (6, 3))


@pytest.mark.parametrize(
    ("epochs", "size", "wanted"),
    [
        (1, None, [(None, [0, 1, 2, 3, 4])]),
        (1, 5, [(None, [0, 1, 2, 3, 4])]),
        (1, 9, [(None, [0, 1, 2, 3, 4])]),
        (2, None, [(0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4])]),
        (1, 2, [(0, [0, 1]), (1, [2, 3]), (2, [4])]),
        (2, 3, [(0, [0, 1, 2]), (1, [3, 4]), (2, [0, 1, 2]), (3, [3, 4])]),
    ],
)
def test_updates_of_a_step(epochs: int, size: int | None, wanted: list[tuple[int | None, list[int]]]) -> None:
    found = [
        (number, [FRAME.index[key] for key in part.samples]) for number, part in FRAME.updates(epochs, size)
    ]
    assert found == wanted
    assert next(iter(FRAME.updates())) == (None, FRAME)
