"""The six experiments: they are what their names say, and they learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regress.dump.metrics_file import read_metrics
from regress.engine.config import load_config
from regress.engine.config.config_schema import flags_by_name

PROJECTS = {
    "experiment_base": "tiny_grpo",
    "experiment_drgrpo": "drgrpo_experiment",
    "experiment_accelerate": "accelerate_grpo",
    "experiment_accelerate_ddp": "grpo_accelerate_ddp",
    "experiment_multiturn_qa": "tiny_grpo_multiturn_qa",
    "experiment_multiturn_tool_calling": "tiny_grpo_multiturn_tool_calling",
}
ALONE = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "WANDB_PROJECT"}
LAUNCH = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)


def trained(
    name: str, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()
) -> list[Mapping[str, Any]]:
    """The metrics of a run as a user starts it."""
    command = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "regress", "train"]
    environment = {key: value for key, value in os.environ.items() if key not in ALONE}
    done = subprocess.run(
        [*command, "--config-name", name, "--no-wandb", "--output_dir", str(folder), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return read_metrics(folder / "metrics.jsonl")


def column(rows: list[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


@pytest.mark.parametrize("name", PROJECTS)
def test_every_experiment_has_its_project_which_the_environment_and_a_flag_replace(name: str) -> None:
    project = {
        "": load_config(config_name=name, environ={}),
        "env": load_config(config_name=name, environ={"WANDB_PROJECT": "env"}),
        "flag": load_config(
            config_name=name, environ={"WANDB_PROJECT": "env"}, flags={"wandb_project": "flag"}
        ),
    }
    assert [one.config.tracking.project for one in project.values()] == [PROJECTS[name], "env", "flag"]
    assert project[""].config.tracking.trackers is None, "wandb, where it can be used"
    assert project[""].config.exp_name == name


def test_the_parallel_experiment_takes_the_processes_it_is_started_with() -> None:
    for size in ("1", "2"):
        config = load_config(config_name="experiment_accelerate_ddp", environ={"WORLD_SIZE": size}).config
        assert (config.parallel.dp, config.parallel.data_parallel) == (int(size), "accelerate")


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "launcher"), [*((name, ()) for name in PROJECTS), ("experiment_accelerate_ddp", LAUNCH)]
)
def test_every_experiment_runs_twenty_steps(name: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    rows = trained(name, tmp_path / "run", "max_steps=20", launcher=launcher)
    assert len(column(rows, "rollouts/returns_mean")) == 20
    assert column(rows, "training/invalid_loss_count") == [0.0] * 20
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.extended
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calling_a_tool_is_learned(seed: int, tmp_path: Path) -> None:
    rows = trained("experiment_multiturn_tool_calling", tmp_path / "run", "--seed", str(seed))
    rewards, rates = column(rows, "rollouts/returns_mean"), column(rows, "eval_avg_test_pass_rate")
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.3
    assert rates[-1] - rates[0] >= 0.15, json.dumps(rates)


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_the_answer_of_a_search_leaves_something_to_learn(tmp_path: Path) -> None:
    """The warm start is short enough for that."""
    rows = trained("experiment_multiturn_qa", tmp_path / "run", "max_steps=20")
    rewards, rates = column(rows, "rollouts/returns_mean"), column(rows, "eval_avg_test_pass_rate")
    assert 0.2 <= rates[0] <= 0.6
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.05


def test_flags_of_the_documents_fit_every_experiment() -> None:
    """A flag on the command line may meet any key of an experiment."""
    flags = {
        "lr": "1e-5",
        "group_size": "8",
        "rollouts_per_step": "8",
        "train_batch_size": "8",
        "max_length": "96",
    }
    assert set(flags) <= {flag.name.replace("-", "_") for flag, _ in flags_by_name().values()}
    for name in PROJECTS:
        config = load_config(config_name=name, environ={}, flags=flags).config
        assert (config.data.max_prompt_length, config.data.max_completion_length) == (48, 48)
        assert (config.data.group_size, config.trainer.mini_batch_size) == (8, 8)
