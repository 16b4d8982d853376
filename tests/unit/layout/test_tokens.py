"""Token layouts map canonical tokens to local places, each exactly once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.layout import ROW_ORDERS, BatchPlan, Segment, TokenLayout, offsets_of, plan_microbatches

lengths_st = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    layout = draw(st.sampled_from(["padded", "packed"]))
    dynamic = draw(st.booleans())
    return BatchPlan(
        layout=layout,
        padding_side=draw(st.sampled_from(["left", "right"])),
        pad_to_multiple_of=draw(st.integers(1, 4)),
        pad_to_length=draw(st.none() | st.integers(1, 12)),
        micro_batch_size=None if dynamic else draw(st.none() | st.integers(1, 9)),
        max_tokens_per_microbatch=draw(st.integers(16, 40)) if dynamic else None,
        row_order=draw(st.sampled_from(ROW_ORDERS)),
    )


@settings(deadline=None)
@given(lengths_st, plans())
def test_every_token_lies_in_exactly_one_place(lengths: list[int], plan: BatchPlan) -> None:
    offsets = offsets_of(lengths)
    flat = np.arange(sum(lengths)) + 1
    back = np.zeros_like(flat)
    for layout in plan_microbatches(lengths, plan):
        local = layout.scatter(flat, offsets)
        assert np.count_nonzero(local) == layout.num_tokens == layout.attention_mask.sum()
        canonical, _ = layout.indices(offsets)
        assert (back[canonical] == 0).all(), "a token was placed twice"
        layout.gather(local, back, offsets)
    np.testing.assert_array_equal(back, flat)


@settings(deadline=None)
@given(lengths_st, plans())
def test_positions_and_samples_agree_with_the_offsets(lengths: list[int], plan: BatchPlan) -> None:
    offsets = offsets_of(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    for layout in plan_microbatches(lengths, plan):
        np.testing.assert_array_equal(layout.scatter(owner, offsets, fill=-1), layout.sample_ids)
        np.testing.assert_array_equal(layout.scatter(position, offsets, fill=-1), layout.positions)
        np.testing.assert_array_equal(layout.position_ids, np.maximum(layout.positions, 0))


@settings(deadline=None)
@given(lengths_st, plans())
def test_json_round_trip(lengths: list[int], plan: BatchPlan) -> None:
    for layout in plan_microbatches(lengths, plan):
        assert TokenLayout.from_json(layout.to_json()) == layout


@settings(deadline=None)
@given(lengths_st, plans())
def test_limits_are_kept(lengths: list[int], plan: BatchPlan) -> None:
    for layout in plan_microbatches(lengths, plan):
        rows, columns = layout.shape
        assert columns % plan.pad_to_multiple_of == 0
        assert columns >= (plan.pad_to_length or 1)
        if plan.layout == "packed":
            assert rows == 1
        if plan.micro_batch_size is not None:
            assert len(layout.segments) <= plan.micro_batch_size
        if plan.max_tokens_per_microbatch is not None:
            assert rows * columns <= plan.max_tokens_per_microbatch


def test_padding_sides() -> None:
    right, left = (
        plan_microbatches([2, 3], BatchPlan(padding_side=side))[0].sample_ids.tolist()
        for side in ("right", "left")
    )
    assert right == [[0, 0, -1], [1, 1, 1]]
    assert left == [[-1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("row_order", "expected"),
    [
        ("given", [[0, 1], [2, 3]]),
        ("longest_first", [[1, 0], [2, 3]]),
        ("shortest_first", [[3, 0], [2, 1]]),
        ("reversed", [[3, 2], [1, 0]]),
    ],
)
def test_rows_and_microbatches_follow_the_row_order_and_ties_keep_theirs(
    row_order: str, expected: list[list[int]]
) -> None:
    for plan in (BatchPlan(micro_batch_size=2, row_order=row_order), BatchPlan("packed", micro_batch_size=2)):
        layouts = plan_microbatches([2, 3, 2, 1], replace(plan, row_order=row_order))
        assert [[segment.sample for segment in layout.segments] for layout in layouts] == expected


def test_an_unknown_row_order_is_refused() -> None:
    with pytest.raises(ValueError, match="row_order='random' is none of given, longest_first"):
        BatchPlan(row_order="random")


def test_a_sequence_split_covers_part_of_a_sample() -> None:
    layout = TokenLayout((1, 4), (Segment(0, 2, 4, 0, 0), Segment(0, 6, 8, 0, 2)))
    assert layout.position_ids.tolist() == [[2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(0, 0, 2, 0, 0), Segment(1, 0, 2, 0, 1)), "overlaps another segment"),
        ((Segment(0, 0, 4, 0, 0),), "leaves the local tensor of shape (1, 3)"),
        ((Segment(0, 2, 2, 0, 0),), "is empty or negative"),
        ((Segment(0, 0, 2, 1, 0),), "leaves the local tensor"),
    ],
)
def test_impossible_segments_are_refused(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(ValueError, match=r"Segment\(") as caught:
        TokenLayout((1, 3), segments)
    assert message in str(caught.value)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="every sample needs at least one token"):
        plan_microbatches([], BatchPlan())
    with pytest.raises(ValueError, match="sample 1 takes 9 tokens but max_tokens_per_microbatch is 8"):
        plan_microbatches([2, 9], BatchPlan(max_tokens_per_microbatch=8))
