"""Dynamic sampling: only groups whose rewards differ are trained on, and a recording of them replays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import read_rows
from regress.dump.trajectory import Trajectory
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.data_components import make_material
from regress.engine.dynamic_sampling import NOTE, FilteredRollouts, sampling_counts, varied
from regress.engine.rollout_worker import TRAIN, VAL, Prompt
from regress.engine.training_run import train
from regress.errors import ConfigError, ReplayError, TaskError

MakeConfig = Callable[..., Config]


@dataclass
class Scripted:
    """Sampler whose groups vary as a list says, one group after the other."""

    varies: list[bool]
    asked: list[Prompt] = field(default_factory=list)

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        found = []
        for prompt in prompts:
            differs = self.varies[len(self.asked) % len(self.varies)]
            self.asked.append(prompt)
            tokens = [*prompt.tokens, 3]
            mask = [0] * len(prompt.tokens) + [1]
            for run in range(prompt.group_size):
                reward = float(run) if differs else 0.5
                found.append(
                    Trajectory(prompt.group_id, run, tokens, mask, reward, prompt_length=len(prompt.tokens))
                )
        return found


def filtered(varies: list[bool], limit: int = 0) -> tuple[FilteredRollouts, Scripted, list[Prompt]]:
    config = load_config(
        overrides=[
            "task.train_size=9",
            "task.eval_size=2",
            "data.prompts_per_step=3",
            "data.group_size=2",
            "data.filter_groups=true",
            f"data.max_generation_batches={limit}",
        ],
        environ={},
    ).config
    prompts = make_material(config).prompts
    sampler = Scripted(varies)
    return FilteredRollouts(sampler, prompts, config), sampler, prompts.train(4)


@settings(deadline=None, max_examples=10)
@given(varies=st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
def test_the_first_groups_that_vary_are_kept_in_the_order_of_sampling(varies: list[bool]) -> None:
    worker, sampler, prompts = filtered(varies)
    found = worker.rollout(4, prompts, TRAIN)
    groups = list(dict.fromkeys(one.group_id for one in found))
    differing = [prompt.group_id for index, prompt in enumerate(sampler.asked) if varies[index % len(varies)]]
    assert groups == differing[:3]
    assert all(varied(found, worker.config).values())
    assert len({prompt.group_id for prompt in sampler.asked}) == len(sampler.asked)
    counts = sampling_counts(found)
    assert counts["rollouts/generation_batches"] == len(sampler.asked) / 3
    assert counts["rollouts/constant_groups"] == len(sampler.asked) - len(differing)


def test_further_prompts_are_other_problems_until_there_are_none() -> None:
    _, _, first = filtered([True])
    prompts = filtered([True])[0].prompts
    further = [prompt.problem.task_id for batch in (1, 2) for prompt in prompts.further(4, batch)]
    began = {prompt.problem.task_id for prompt in first}
    assert len(set(further)) == 6
    assert not began & set(further)
    again = [prompt.problem.task_id for prompt in prompts.further(4, 3)]
    assert again == further[:3]
    assert [prompt.group_id for prompt in prompts.further(4, 2)] == [
        "000004-0006",
        "000004-0007",
        "000004-0008",
    ]


def test_too_many_batches_end_the_run_with_the_numbers() -> None:
    worker, sampler, prompts = filtered([False, False, False, True, False, False], limit=2)
    with pytest.raises(
        TaskError, match=r"data\.max_generation_batches=2: of 3 groups of step 4 only 1 have different"
    ):
        worker.rollout(4, prompts, TRAIN)
    assert len(sampler.asked) == 6


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.filter_metric=exact_match"], "data.filter_metric=exact_match is not read"),
        (
            ["data.filter_groups=true", "data.group_size=1", "algorithm.single_sample=raw"],
            "and data.group_size=1 leaves nothing to compare",
        ),
        (
            ["data.filter_groups=true", "data.filter_metric=acc"],
            "data.filter_metric=acc is not a reward of task.rewards",
        ),
    ],
)
def test_settings_that_filter_nothing_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config(overrides=overrides, environ={})


def test_evaluations_are_not_filtered() -> None:
    worker, _, prompts = filtered([False])
    assert len(worker.rollout(4, prompts, VAL)) == 6


def test_a_metric_that_no_reward_has_is_refused() -> None:
    worker, _, prompts = filtered([True])
    worker.config.data.filter_metric = "accuracy"
    with pytest.raises(ReplayError, match=r"has no reward 'accuracy', which data\.filter_metric names"):
        worker.rollout(4, prompts, TRAIN)


FILTERED = ("data.filter_groups=true", "data.max_generation_batches=40", "algorithm.preset=dapo")


def rewards(folder: Path, step: int) -> list[Trajectory]:
    from regress.dump.trajectory import from_record

    reader = DumpReader(folder)
    record = next(one for one in reader.records() if one.type == "trajectory" and one.step == step)
    return from_record(record)


@pytest.mark.parametrize("metric", [pytest.param("reward", marks=pytest.mark.extended), "exact_match"])
def test_a_run_and_its_replay(config: MakeConfig, console: Console, tmp_path: Path, metric: str) -> None:
    own = (*FILTERED, f"data.filter_metric={metric}", "warm_start.steps=30", "debug.enable_data_dump=true")
    shown = (
        "debug.dump_options.trajectory=true",
        "debug.dump_options.param=true",
        "debug.dump_options.loss=true",
    )
    recorded = config(*own, *shown, f"output_dir={tmp_path / 'recorded'}")
    train(recorded, console)
    folder = Path(recorded.debug.dump_dir)
    kept = [rewards(folder, step) for step in range(2)]
    for found in kept:
        assert len({one.group_id for one in found}) == 2
        assert all(varied(found, recorded).values())
    left_out = sum(found[0].extra[NOTE]["constant_groups"] for found in kept)
    assert left_out or metric == "reward", "nothing was filtered"
    replay = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={folder}",
    )
    replayed = config(*own, *shown, *replay, f"output_dir={tmp_path / 'replayed'}")
    train(replayed, console)
    first, second = DumpReader(folder), DumpReader(Path(replayed.debug.dump_dir))
    assert first.names() == second.names()
    assert all(first.read(name).checksum() == second.read(name).checksum() for name in first.names())
    rows = [read_rows(Path(one.output_dir) / "metrics.jsonl") for one in (recorded, replayed)]
    counts = [
        [row["rollouts/generation_batches"] for row in found if "rollouts/generation_batches" in row]
        for found in rows
    ]
    assert counts[0] == counts[1] == [float(found[0].extra[NOTE]["generation_batches"]) for found in kept]


def test_a_recording_without_the_filter_is_refused_where_a_group_does_not_vary(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    recorded = config(
        "debug.enable_data_dump=true",
        "debug.dump_options.trajectory=true",
        f"output_dir={tmp_path / 'recorded'}",
        "warm_start.steps=0",
    )
    train(recorded, console)
    replay = config(
        *FILTERED,
        "data.filter_metric=exact_match",
        "warm_start.steps=0",
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={recorded.debug.dump_dir}",
    )
    with pytest.raises(ReplayError, match="was recorded with equal rewards of 'exact_match'"):
        train(replay, console)
