"""Values of the metrics by definition, and the table that names each of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from regress.dump.metrics_file import metrics_of, read_metrics
from regress.dump.trajectory import Trajectory
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import SingleProcess
from regress.engine.metric_table import METRICS, metric
from regress.engine.mini_batch import LossTokens
from regress.engine.step_metrics import (
    RunTotals,
    dr_grpo_metrics,
    epoch_metrics,
    layout_metrics,
    rollout_metrics,
    token_statistics,
)
from regress.engine.training_run import train
from regress.engine.training_step import StepOutcome
from regress.grpo.objective import Objective
from regress.grpo.update_metrics import Metric
from regress.layout import Mesh, RankPlan

MakeConfig = Callable[..., Config]

TINY = (
    "max_steps=2",
    "task.train_size=12",
    "task.eval_size=4",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "warm_start.steps=6",
    "warm_start.batch_size=8",
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
)
DR_GRPO = (
    "algorithm.preset=dr_grpo",
    "algorithm.kl_coef=0.05",
    "algorithm.entropy_coef=0.01",
    "algorithm.sampler_correction=token_truncate",
    "algorithm.correction_max=2.0",
    "evaluation.every_n_steps=1",
    "evaluation.samples_per_prompt=2",
    "trainer.mini_batch_size=4",
    "trainer.save_updates=1",
    "curriculum.enable=true",
    "curriculum.stages=[{name: only, levels: [1], complexity: [0, 10], threshold: 0.5}]",
)
TURNS = (
    "task.max_turns=2",
    "task.environment=checker",
    "data.max_completion_length=48",
    "data.max_seq_length=80",
)
MASKED = ("algorithm.top_entropy_quantile=0.8",)
LOGGED_ELSEWHERE = (
    "CUDA",
    "DDP",
    "parallel.data_parallel=accelerate",
    "EnhancedInferenceCallback",
    "checkpoints",
)
"""Needs of metrics that the runs of this file do not have; other tests log them."""


def rows_of(run: Config) -> list[dict[str, Any]]:
    """Return the rows of a run, as they are read."""
    train(run, Console(quiet=True))
    return read_metrics(Path(run.output_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of a run of Dr. GRPO with everything that it can log."""
    folder = tmp_path_factory.mktemp("dr_grpo")
    return rows_of(load_config(overrides=[*TINY, f"output_dir={folder}", *DR_GRPO], environ={}).config)


def unknown(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names without a definition."""
    return sorted({name for row in rows for name in metrics_of(row) if metric(name) is None})


def test_the_table_names_what_is_logged_and_nothing_else(
    rows: list[dict[str, Any]], config: MakeConfig
) -> None:
    both = rows + rows_of(config(*TURNS, *MASKED, "max_steps=1", "data.filter_groups=true"))
    assert not unknown(both), (
        f"{unknown(both)} are logged, but have no definition in regress.engine.metric_table"
    )
    used = {metric(name) for row in both for name in metrics_of(row)}
    idle = [one.name for one in METRICS if one not in used and one.needs not in LOGGED_ELSEWHERE]
    assert not idle, f"{idle} are in regress.engine.metric_table, but nothing logs them"


SMALL = (
    "max_steps=1",
    "warm_start.steps=2",
    "data.prompts_per_step=2",
    "data.group_size=2",
    "trainer.mini_batch_size=null",
    "task.train_size=16",
    "task.eval_size=2",
    "tracking.trackers=[]",
)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        f"experiment_{name}"
        for name in ("base", "drgrpo", "accelerate", "multiturn_qa", "multiturn_tool_calling")
    ],
)
def test_an_experiment_logs_what_the_table_names(name: str, tmp_path: Path) -> None:
    run = load_config(None, name, [*SMALL, f"output_dir={tmp_path}"], environ={}).config
    rows = rows_of(run)
    assert not unknown(rows)
    names = {name for row in rows for name in metrics_of(row)}
    assert names >= {
        "rollouts/kl_mean",
        "training_step/kl",
        "training_epoch/kl_std",
        "final/best_mean_return",
    }
    assert ("batch_returns/mean" in names) == ("examples/completion" in names) == ("multiturn" in name)
    assert ("dr_grpo/critic_type" in names) == (name == "experiment_drgrpo")
    assert ("accelerate/device" in names) == (name == "experiment_accelerate")


def test_a_checkpoint_is_logged_at_its_own_place(rows: list[dict[str, Any]]) -> None:
    """Also inside a step, and whenever its writing ends."""
    saved = [
        (row["step"], row.get("update"), row["checkpoint/step"]) for row in rows if "checkpoint/saved" in row
    ]
    assert saved == [(0, 0, 0.0), (1, None, 1.0), (1, 2, 1.0), (2, None, 2.0)]


def test_the_terms_of_dr_grpo_add_up_to_its_loss(rows: list[dict[str, Any]]) -> None:
    updates = [row for row in rows if "training_step/loss" in row]
    assert len(updates) == 4
    for row in updates:
        terms = {name: value for name, value in row.items() if "dr_component" in name}
        assert len(terms) == 3
        assert sum(terms.values()) == pytest.approx(row["training_step/loss"], rel=1e-5)
    assert all(any(row[name] for row in updates) for name in terms)


def trajectory(reward: float, length: int = 3, finish: str = "stop") -> Trajectory:
    return Trajectory(
        group_id="g",
        run_id=0,
        tokens=[1] * (2 + length),
        loss_mask=[0, 0] + [1] * length,
        prompt_length=2,
        reward=reward,
        finish_reason=finish,
    )


def test_deviations_divide_by_one_less_than_the_number() -> None:
    """A group of one has none, and not the NaN that spoils whatever is computed with it."""
    values = rollout_metrics([trajectory(reward) for reward in (0.0, 1.0, 1.0)])
    assert values["rollouts/returns_std"] == pytest.approx(statistics.stdev([0, 1, 1]))
    assert values["rollouts/returns_sum"] == 2.0
    assert rollout_metrics([trajectory(1.0)])["rollouts/returns_std"] == 0.0


def tokens(advantages: list[float], sequence: list[int], **more: Any) -> LossTokens:
    return LossTokens(
        sequence=torch.tensor(sequence),
        num_sequences=max(sequence) + 1,
        advantages=torch.tensor(advantages),
        **more,
    )


def test_advantages_count_by_sample_however_long_it_is() -> None:
    values = token_statistics([tokens([1.0, 1.0, 1.0, -1.0], [0, 0, 0, 1]), tokens([3.0], [0])])
    assert values["rollouts/advantages_mean"] == pytest.approx(1.0)
    assert values["rollouts/advantages_std"] == pytest.approx(2.0)
    assert "rollouts/kl_mean" not in values


def test_the_kl_of_a_rollout_is_over_loss_tokens_only() -> None:
    """Padding has a KL of 0, and would make the mean as small as the batch is ragged."""
    old, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    values = token_statistics([tokens([0.0, 0.0], [0, 1], old_log_probs=old, ref_log_probs=ref)])
    d = (ref - old).double()
    k3 = torch.exp(d) - 1 - d
    assert values["rollouts/kl_mean"] == pytest.approx(k3.mean().item())
    assert values["rollouts/kl_std"] == pytest.approx(k3.std().item())
    assert values["rollouts/kl_max"] == pytest.approx(k3.max().item())


def test_skewness_is_that_of_the_advantages_and_not_a_quotient_by_their_mean() -> None:
    """Advantages of Dr. GRPO have mean 0, by which nothing can be divided."""
    objective = Objective(scale="none", aggregation="seq-mean-token-sum-norm")
    even = dr_grpo_metrics([tokens([-1.0, 1.0], [0, 1])], objective)
    assert even["dr_grpo/advantages_skewness"] == pytest.approx(0.0)
    assert even["dr_grpo/advantages_variance"] == pytest.approx(2.0)
    skewed = dr_grpo_metrics([tokens([2.0, -1.0, -1.0], [0, 1, 2])], objective)
    assert skewed["dr_grpo/advantages_skewness"] == pytest.approx(2 / 2**1.5)
    assert dr_grpo_metrics([tokens([0.0, 0.0], [0, 1])], objective)["dr_grpo/advantages_skewness"] == 0.0
    assert skewed["dr_grpo/critic_type"] == "none: mean reward of the group"


def test_an_epoch_is_all_updates_of_a_step() -> None:
    outcomes = [StepOutcome(loss, loss * 2, {"kl": Metric(loss, 2)}) for loss in (1.0, 3.0)]
    assert epoch_metrics(outcomes) == pytest.approx(
        {
            "training_epoch/loss_mean": 2.0,
            "training_epoch/loss_std": 2**0.5,
            "training_epoch/grad_norm_mean": 4.0,
            "training_epoch/grad_norm_max": 6.0,
            "training_epoch/steps_per_epoch": 2.0,
            "training_epoch/kl_mean": 1.0,
            "training_epoch/kl_std": 0.5**0.5,
        }
    )


def test_an_update_that_was_left_out_spoils_no_mean() -> None:
    values = epoch_metrics([StepOutcome(1.0, 2.0, {}), StepOutcome(float("nan"), 1.0, {}, skipped=True)])
    assert values["training_epoch/loss_mean"] == 1.0
    assert values["training_epoch/steps_per_epoch"] == 2.0


class Others(SingleProcess):
    """Rank 0 of two, both with what this one has."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = RankPlan(mesh=Mesh(dp=2))

    def gather(self, value: Any) -> list[Any]:
        return [value, tuple(10 * part for part in value)]


@pytest.mark.parametrize("kind", ["ddp", "accelerate"])
def test_a_layout_tells_its_processes(kind: str, config: MakeConfig) -> None:
    run = config()
    run.parallel = replace(run.parallel, data_parallel=kind, dp=2)
    values = layout_metrics(run, Others(), torch.device("cpu"))  # type: ignore[arg-type]
    assert values["ddp/num_processes"] == 2.0
    assert values.get("accelerate/device") == ("cpu" if kind == "accelerate" else None)
    assert not any(name.startswith("system/gpu") for name in values)
    assert all(metric(name) is not None for name in values)


def test_memory_of_the_device_is_that_of_the_rank_that_uses_most(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**31)
    values = layout_metrics(config(), Others(), torch.device("cuda"))  # type: ignore[arg-type]
    assert values == {"system/gpu_memory_allocated_gb": 10.0, "system/gpu_memory_reserved_gb": 20.0}


def test_totals_go_on_after_a_resume() -> None:
    steps = [rollout_metrics([trajectory(reward)] * 2) for reward in (0.5, 1.0, 0.25)]
    whole, first, second = RunTotals(), RunTotals(), RunTotals()
    expected = [whole.count(step, several_turns=True) for step in steps]
    found = [first.count(steps[0], several_turns=True)]
    second.load_state_dict(first.state_dict())
    found += [second.count(step, several_turns=True) for step in steps[1:]]
    assert found == expected
    assert second.final(3) == whole.final(3)
    assert whole.final(3) == {
        "final/total_steps": 3.0,
        "final/total_batches": 3.0,
        "final/total_rollouts": 6.0,
        "final/best_mean_return": 1.0,
    }
