"""Layouts of ranks: whatever the mesh and the split, each token lies on one rank, and is predicted where it should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.layout import (
    ROW_ORDERS,
    SAMPLE_SPLITS,
    SEQUENCE_SPLITS,
    BatchPlan,
    Mesh,
    RankPlan,
    offsets_of,
    plan_ranks,
)

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@st.composite
def batch_plans(draw: st.DrawFn) -> BatchPlan:
    plan = BatchPlan(
        layout=draw(st.sampled_from(["padded", "packed"])),
        micro_batch_size=draw(st.sampled_from([None, 1, 2, 5])),
        pad_to_multiple_of=draw(st.sampled_from([1, 3])),
        row_order=draw(st.sampled_from(ROW_ORDERS)),
    )
    return (
        plan
        if plan.layout == "packed"
        else replace(plan, padding_side=draw(st.sampled_from(["left", "right"])))
    )


@st.composite
def rank_plans(draw: st.DrawFn) -> RankPlan:
    size = st.sampled_from([1, 1, 2, 3])
    mesh = Mesh(
        pp=draw(size), dp=draw(size), fsdp=draw(size), cp=draw(st.sampled_from([1, 2, 3, 4])), tp=draw(size)
    )
    return RankPlan(
        mesh,
        draw(st.sampled_from(SAMPLE_SPLITS)),
        draw(st.sampled_from(SEQUENCE_SPLITS)),
        draw(st.booleans()),
    )


@settings(deadline=None)
@given(LENGTHS, batch_plans(), rank_plans())
def test_every_token_is_read_once_and_predicted_once(
    lengths: list[int], plan: BatchPlan, ranks: RankPlan
) -> None:
    offsets = offsets_of(lengths)
    read, predicted = np.zeros(offsets[-1], int), np.zeros(offsets[-1], int)
    for rank, layouts in enumerate(plan_ranks(lengths, plan, ranks)):
        place = ranks.mesh.coordinates(rank)
        if place["pp"] or place["tp"]:
            continue  # they hold the tokens of others
        for layout in layouts:
            np.add.at(read, layout.tokens.indices(offsets)[0], 1)
            np.add.at(predicted, layout.targets.indices(offsets)[0], 1)
    first = np.zeros(offsets[-1], bool)
    first[offsets[:-1]] = True
    assert (read == 1).all()
    assert (predicted[~first] == 1).all()
    assert (predicted[first] == (1 if ranks.mesh.cp == 1 else 0)).all()


@settings(deadline=None)
@given(LENGTHS, batch_plans(), rank_plans())
def test_the_columns_of_a_rank_are_those_of_the_whole_row(
    lengths: list[int], plan: BatchPlan, ranks: RankPlan
) -> None:
    for rank, layouts in enumerate(plan_ranks(lengths, plan, ranks)):
        for layout in layouts:
            columns = np.concatenate([np.arange(*found) for found in layout.columns])
            assert (layout.whole.sample_ids[:, columns] == layout.tokens.sample_ids).all()
            assert (layout.whole.positions[:, columns] == layout.tokens.positions).all()
            assert layout.columns == ranks.columns(layout.whole.shape[1], rank)


@settings(deadline=None)
@given(LENGTHS, batch_plans(), rank_plans())
def test_a_value_lies_beside_the_token_that_predicts_it(
    lengths: list[int], plan: BatchPlan, ranks: RankPlan
) -> None:
    """Under context parallelism; the hidden state in that column is of the position before, of the same sample."""
    for layouts in plan_ranks(lengths, plan, ranks):
        for layout in layouts:
            if ranks.mesh.cp == 1:
                assert layout.targets is layout.tokens
                continue
            held = layout.targets.sample_ids >= 0
            assert (layout.targets.sample_ids[held] == layout.tokens.sample_ids[held]).all()
            assert (layout.targets.positions[held] == layout.tokens.positions[held] + 1).all()


@settings(deadline=None)
@given(LENGTHS, batch_plans(), rank_plans())
def test_ranks_meet_in_every_microbatch(lengths: list[int], plan: BatchPlan, ranks: RankPlan) -> None:
    """The same number on each; rows that the splits divide; under a pipeline one shape."""
    planned = plan_ranks(lengths, plan, ranks)
    assert len({len(layouts) for layouts in planned}) == 1
    shapes = {layout.tokens.shape for layouts in planned for layout in layouts}
    assert ranks.mesh.pp == 1 or len(shapes) == 1
    for layout in (layout for layouts in planned for layout in layouts):
        assert layout.whole.shape[1] % ranks.columns_multiple == 0
        assert layout.tokens.shape[1] * ranks.mesh.cp == layout.whole.shape[1]


def test_contiguous_and_interleaved_samples() -> None:
    ranks = RankPlan(Mesh(dp=3))
    assert [ranks.samples(7, rank) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    dealt = replace(ranks, sample_split="interleaved")
    assert [dealt.samples(7, rank) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_zigzag_rank_has_an_early_and_a_late_block() -> None:
    ranks = RankPlan(Mesh(cp=2), sequence_split="zigzag")
    assert [ranks.columns(8, rank) for rank in range(2)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]


def test_a_rank_that_is_out_of_samples_runs_empty_microbatches() -> None:
    planned = plan_ranks([3, 4], BatchPlan(micro_batch_size=1), RankPlan(Mesh(dp=3)))
    assert [[len(layout.tokens.segments) for layout in layouts] for layouts in planned] == [[1], [1], [0]]


@pytest.mark.parametrize("name", ["sample_split", "sequence_split"])
def test_an_unknown_split(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}='random' is none of contiguous, \w+; choose one$"):
        RankPlan(**{name: "random"})  # type: ignore[arg-type]
