"""What a replay will compute: updates, microbatches and samples, as the trainer cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.dump.trajectory import Trajectory
from regress.errors import ConfigError
from regress.replay.plan import plan_replay

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=9)


def samples(lengths: list[int]) -> list[Trajectory]:
    return [
        Trajectory(f"g{i // 2}", i % 2, [1] * n, [0] + [1] * (n - 1), 0.0, 1) for i, n in enumerate(lengths)
    ]


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
