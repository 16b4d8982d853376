"""Tiny runs of the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from regress.engine.config import load_config
from regress.engine.config.config_schema import Config

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


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """``config("key=value", ...)``: a configuration of a run that takes a fraction of a second."""

    def make(*overrides: str) -> Config:
        return load_config(overrides=[*TINY, f"output_dir={tmp_path / 'run'}", *overrides], environ={}).config

    return make


@pytest.fixture
def console() -> Console:
    """A console that shows nothing."""
    return Console(quiet=True)
