"""TensorBoard: a resume hides what is made again, on both axes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from regress.engine.tracking.metrics_replay import replay
from tests.trackers.conftest import LOSSES, RATES, REWARDS

pytest.importorskip("tensorboard")

TAGS = {"rollouts/returns_mean": REWARDS, "eval_avg_test_pass_rate": RATES}


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return what a reader of the event files in a folder shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def check(folder: Path) -> None:
    (run,) = (folder / "tensorboard").iterdir()
    for tag, expected in TAGS.items():
        assert points(run, tag) == [(step, pytest.approx(value)) for step, value in expected.items()]
    losses = points(run / "updates", "training_step/loss")
    assert losses == [(update, pytest.approx(value)) for update, value in LOSSES.items()]


def test_every_point_is_shown_once_after_a_resume(interrupted: Callable[..., Path]) -> None:
    check(interrupted("tensorboard"))


def test_the_record_replays(interrupted: Callable[..., Path]) -> None:
    folder = interrupted()
    replay(folder, "tensorboard", notice=pytest.fail)
    check(folder)
