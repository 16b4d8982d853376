"""Plan of a replay: updates, ranks, microbatches and samples, as the trainer splits them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regress.dump.trajectory import Trajectory
from regress.errors import ConfigError
from regress.layout import DIMENSIONS
from regress.parallel.pipeline_schedules import SCHEDULES, ranks_of_stages
from regress.replay.replay_plan import plan_replay

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=9)


def samples(lengths: list[int]) -> list[Trajectory]:
    return [
        Trajectory(f"g{i // 2}", i % 2, [1] * n, [0] + [1] * (n - 1), 0.0, 1) for i, n in enumerate(lengths)
    ]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_every_epoch_has_every_token_once(lengths: list[int], epochs: int, mini: int, micro: int) -> None:
    updates = plan_replay(
        {0: samples(lengths)},
        {"trainer": {"epochs": epochs, "mini_batch_size": mini}},
        {"batching.micro_batch_size": micro},
    )
    per_epoch = -(-len(lengths) // mini)
    assert len(updates) == epochs * per_epoch
    for start in range(0, len(updates), per_epoch):
        epoch = updates[start : start + per_epoch]
        assert [key for update in epoch for key in update.frame.samples] == [t.key for t in samples(lengths)]
        for update in epoch:
            (layouts,) = update.layouts
            assert sum(layout.tokens.num_tokens for layout in layouts) == update.frame.size
            assert all(len(layout.tokens.segments) <= micro for layout in layouts)
    several = len(updates) > 1
    assert [update.update for update in updates] == ([*range(len(updates))] if several else [None])


def test_a_step_of_one_update_has_no_update_in_its_name() -> None:
    (update,) = plan_replay({3: samples([2, 3])}, {}, {})
    assert update.where == "step_000003"


def test_overrides_win_over_the_case() -> None:
    (update,) = plan_replay(
        {0: samples([4, 2])}, {"batching": {"layout": "packed"}}, {"batching.layout": "padded"}
    )
    assert update.layouts[0][0].tokens.shape == (2, 4)


def test_a_budget_that_is_too_small_is_named() -> None:
    with pytest.raises(ConfigError, match="step 0 cannot be batched: sample 0 takes 4 tokens"):
        plan_replay({0: samples([4, 2])}, {}, {"batching.max_tokens_per_microbatch": 3})


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, Any]:
    """Overrides of ``parallel`` for up to 12 ranks."""
    sizes = {name: draw(st.sampled_from([1, 1, 2, 3])) for name in draw(st.permutations(DIMENSIONS))}
    assume(math.prod(sizes.values()) <= 12)
    given = {
        **sizes,
        "sample_split": draw(st.sampled_from(["contiguous", "interleaved"])),
        "cp_split": draw(st.sampled_from(["contiguous", "zigzag"])),
        "sequence_parallel": draw(st.booleans()),
    }
    return {f"parallel.{name}": value for name, value in given.items()}


@settings(deadline=None)
@given(LENGTHS, meshes(), st.integers(1, 4))
def test_ranks_that_repeat_no_other_hold_every_token_once(
    lengths: list[int], mesh: dict[str, Any], micro: int
) -> None:
    (update,) = plan_replay({0: samples(lengths)}, {"batching": {"micro_batch_size": micro}}, mesh)
    records = update.records
    assert len(update.layouts) == math.prod(mesh[f"parallel.{name}"] for name in DIMENSIONS)
    assert records.micros == tuple(
        (rank, micro) for rank, own in enumerate(update.layouts) for micro in range(len(own))
    )
    times = np.zeros(update.frame.size, np.int64)
    loss = np.zeros(update.frame.size, np.int64)
    for rank, own in enumerate(update.layouts):
        root = records.root(rank)
        assert root <= rank
        assert records.root(root) == root
        assert own == update.layouts[root], "a rank repeats the tokens of another, place by place"
        if root == rank:
            for layout in own:
                times[layout.tokens.indices(update.frame.offsets)[0]] += 1
                loss[layout.targets.indices(update.frame.offsets)[0]] += 1
    assert (times == 1).all()
    assert (loss[update.loss_mask] == 1).all()
    assert loss.max() <= 1


@settings(deadline=None)
@given(LENGTHS, meshes())
def test_the_loss_is_on_the_last_stage_of_the_pipeline(lengths: list[int], mesh: dict[str, Any]) -> None:
    (update,) = plan_replay({0: samples(lengths)}, {}, mesh)
    pp, records = mesh["parallel.pp"], update.records
    per_stage = len(update.layouts) // pp
    assert [records.part(rank) for rank in records.ranks] == [rank // per_stage for rank in records.ranks]
    assert records.divided == (pp > 1)
    last = set(range((pp - 1) * per_stage, pp * per_stage))
    assert set(records.ranks) - records.without_loss == last


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_the_pipeline_says_where_the_loss_is(name: str) -> None:
    schedule = SCHEDULES[name]
    (update,) = plan_replay({0: samples([3, 2])}, {}, {"parallel.pp": 4, "parallel.pp_schedule": name})
    assert update.loss_stage == ranks_of_stages(name, 4, schedule.least)[-1]


def test_the_loss_tokens_of_a_layout() -> None:
    """Two ranks share each sequence; of the tokens before the first loss token nothing is known to the loss."""
    trajectory = Trajectory("g", 0, [1] * 8, [0] * 5 + [1, 1, 1], 0.0, 5)
    (update,) = plan_replay({0: [trajectory]}, {}, {"parallel.cp": 2})
    assert [update.loss_tokens(own[0].targets) for own in update.layouts] == [0, 3]
    assert [update.loss_tokens(own[0].tokens) for own in update.layouts] == [0, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"parallel.tp": 0},
            "parallel={'tp': 0} with batching={} with trainer={} cannot be planned (ValueError: parallel.tp=0",
        ),
        ({"parallel.sample_split": "random"}, "sample_split='random' is none of contiguous, interleaved"),
    ],
)
def test_a_mesh_that_cannot_be_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_replay({0: samples([4, 2])}, {}, overrides)
    assert message in str(caught.value)
