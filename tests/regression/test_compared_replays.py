"""Healthy float32 replays of recorded rollouts, compared as by default: no seed raises an alarm."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regress.compare.comparison_request import compare_sources
from regress.engine.config import load_config
from regress.engine.training_run import train

SEEDS = range(50)
RECORDED = {
    "trajectory": True,
    "old_log_probs": True,
    "forward_data": True,
    "loss": True,
    "is_loss_debug": True,
    "batch_inputs": True,
    "gradient": True,
    "param": True,
}
RUN = {
    "max_steps": 1,
    "data.prompts_per_step": 4,
    "data.group_size": 4,
    "warm_start.steps": 40,
    "optimizer.warmup_steps": 0,
    "evaluation.every_n_steps": 0,
    "debug.enable_data_dump": True,
    **{f"debug.dump_options.{name}": known for name, known in RECORDED.items()},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "microbatches of three": {"batching.micro_batch_size": 3},
    "left padding, microbatches of four": {"batching.padding_side": "left", "batching.micro_batch_size": 4},
}


def trained(folder: Path, **settings: Any) -> Path:
    values = {**RUN, "output_dir": folder, "debug.dump_dir": folder / "dump", **settings}
    overrides = [f"{key}={'true' if value is True else value}" for key, value in values.items()]
    train(load_config(None, "reverse_string", overrides).config, Console(file=io.StringIO()))
    return folder / "dump"


FIRST, *_ = LAYOUTS
CASES = [(seed, name) for seed in SEEDS for name in LAYOUTS]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    return cache(lambda seed: trained(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed))


@pytest.mark.parametrize(
    ("seed", "layout"),
    [case if case == (0, FIRST) else pytest.param(*case, marks=pytest.mark.extended) for case in CASES],
)
def test_a_healthy_replay_is_within_tolerance(
    seed: int, layout: str, golden: Callable[[int], Path], tmp_path: Path
) -> None:
    recorded = golden(seed)
    mock = {
        "rollout_worker.type": "mock",
        "rollout_worker.need_llm_inference": "false",
        "rollout_worker.trajectory_load_path": recorded / "trajectory" / "step_000000.safetensors",
    }
    found = compare_sources(recorded, trained(tmp_path, seed=seed, **mock, **LAYOUTS[layout]))
    assert [f"{verdict.name}: {verdict.multiple:.3g}" for verdict in found.failed] == []
    assert found.exit_code == 0
