"""A reward function that returns None leaves the completion out of every statistic of its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import read_rows
from regress.dump.trajectory import Trajectory, from_record
from regress.engine.config.config_schema import Config
from regress.engine.rollout_worker import UNSCORED
from regress.engine.sample_rewards import rewards_of
from regress.engine.training_run import train
from regress.errors import ReplayError, TaskError
from regress.tasks import reward_functions
from regress.tasks.problem import Problem

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def own_rewards() -> Iterator[None]:
    """Two functions that leave every second and every third completion out, by their characters."""
    names = "odd_length", "long_enough"

    @reward_functions.register_reward(names[0])
    def odd(problem: Problem, completion: str) -> float | None:  # type: ignore[type-var]  # None is the point
        number = sum(map(ord, completion))
        return float(number % 7) if number % 2 else None

    @reward_functions.register_reward(names[1])
    def long(problem: Problem, completion: str) -> float | None:  # type: ignore[type-var]  # None is the point
        number = sum(map(ord, completion))
        return float(number % 5) if number % 3 else None

    yield
    for name in names:
        del reward_functions._REGISTRY[name]


REWARDS = {"odd_length": 1.0, "long_enough": 2.0}
OWN = (
    "algorithm.missing_rewards=exclude",
    "debug.enable_data_dump=true",
    "debug.dump_options.trajectory=true",
    "debug.dump_options.is_loss_debug=true",
    "warm_start.steps=0",
    "max_steps=1",
)


def recorded(config: Config) -> list[Trajectory]:
    reader = DumpReader(Path(config.debug.dump_dir))
    return from_record(next(one for one in reader.records() if one.type == "trajectory"))


@pytest.mark.parametrize("rule", ["sum_then_normalize", "normalize_then_sum"])
def test_samples_that_nobody_scored_have_no_advantage(
    config: MakeConfig, console: Console, tmp_path: Path, rule: str
) -> None:
    made = config(*OWN, f"algorithm.reward_aggregation={rule}", f"output_dir={tmp_path / 'run'}")
    made.task.rewards = REWARDS
    train(made, console)
    found = recorded(made)
    unscored = [one for one in found if UNSCORED in one.extra]
    assert 0 < len(unscored) < len(found)
    assert all(not one.rewards and one.reward == 0.0 for one in unscored)
    assert any(0 < len(one.rewards) < 2 for one in found), "no function alone left a sample out"
    values, _ = rewards_of(found, made)
    table = torch.tensor(values, dtype=torch.float64).reshape(len(found), -1)
    gone = table.isnan().all(1).tolist()
    assert gone == [UNSCORED in one.extra for one in found]
    scored = [one.reward for one in found if UNSCORED not in one.extra]
    (row,) = [
        row for row in read_rows(Path(made.output_dir) / "metrics.jsonl") if "rollouts/returns_mean" in row
    ]
    assert row["rollouts/returns_mean"] == pytest.approx(math.fsum(scored) / len(scored))


def test_none_is_refused_without_the_rule(config: MakeConfig, console: Console) -> None:
    refused = config(*(one for one in OWN if "missing" not in one))
    refused.task.rewards = REWARDS
    with pytest.raises(
        TaskError, match=r"returned None; .* or None under algorithm\.missing_rewards=exclude"
    ):
        train(refused, console)


def test_a_reward_that_a_recording_lacks_is_no_reward_that_was_left_out(config: MakeConfig) -> None:
    """Rewards of other names may be those of another run."""
    made = config(*OWN, "algorithm.reward_aggregation=normalize_then_sum")
    made.task.rewards = REWARDS
    foreign = Trajectory("a", 0, [1, 2], [0, 1], 1.0, prompt_length=1, rewards={"accuracy": 1.0})
    with pytest.raises(ReplayError, match="has no reward 'odd_length'"):
        rewards_of([foreign], made)
