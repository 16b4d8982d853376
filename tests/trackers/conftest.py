"""Runs with real trackers: what they keep on disk is read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from regress.engine.tracking.metrics_log import TrackedLog
from regress.engine.tracking.run_identity import Wishes

UPDATES = 2
"""Optimizer updates of each step."""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that reach no server, and write below the test's directory."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interrupted(tmp_path: Path, offline: None) -> Callable[..., Path]:
    """``interrupted(tracker)``: a run of 200 steps that got to 150, and went on from its checkpoint after 100."""

    def make(*trackers: str, stop: int = 200) -> Path:
        warnings: list[str] = []

        def opened() -> TrackedLog:
            wishes = Wishes(name="run", output_dir=tmp_path, settings={"seed": 0})
            return TrackedLog(wishes, trackers, warn=warnings.append, finish_timeout=60.0)

        first = opened()
        for step in range(150):
            evaluate(first, step)
            if step == 100:
                state = first.state_dict()
            log_step(first, step)
        first.finish()
        if stop > 100:
            second = opened()
            second.load_state_dict(state)
            second.resumed("checkpoint-100", step=100, update=100 * UPDATES)
            for step in range(100, stop):
                if step > 100:  # what the checkpoint knows is not done again
                    evaluate(second, step)
                log_step(second, step)
            second.finish()
        assert not warnings
        return tmp_path

    return make


def evaluate(log: TrackedLog, step: int) -> None:
    """Log as the loop does when an evaluation is due, before the checkpoint of this step."""
    if step % 50 == 0:
        log.log({"eval_avg_test_pass_rate": step / 200}, step=step)


def log_step(log: TrackedLog, step: int) -> None:
    """Log the updates and the end of a step."""
    for update in range(step * UPDATES, (step + 1) * UPDATES):
        log.log({"training_step/loss": loss(update)}, step=step, update=update)
    log.log({"rollouts/returns_mean": reward(step), "examples/completion": f"text {step}"}, step=step)


def loss(update: int) -> float:
    return 1 / (1 + update)


def reward(step: int) -> float:
    return step / 10


REWARDS = {step: reward(step) for step in range(200)}
LOSSES = {update: loss(update) for update in range(200 * UPDATES)}
RATES = {step: step / 200 for step in (0, 50, 100, 150)}
