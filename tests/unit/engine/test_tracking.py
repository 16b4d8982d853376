"""Metrics go to metrics.jsonl and to every tracker that is named, once a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console

from regress.engine.config.schema import Config
from regress.engine.outputs import Outputs
from regress.engine.run import train
from regress.engine.tracking import Log, tracking
from regress.errors import ConfigError

MakeConfig = Callable[..., Config]


class Memory(GeneralTracker):
    """Keeps what it is given."""

    name = "memory"
    requires_logging_directory = False
    rows: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []
    settings: ClassVar[dict[str, Any]] = {}
    finished: ClassVar[bool] = False

    def __init__(self, run_name: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        type(self).settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        type(self).finished = True


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "memory", Memory)
    Memory.rows.clear()
    Memory.finished = False
    return Memory


@contextmanager
def opened(run: Config) -> Iterator[Log]:
    with Outputs(Path(run.output_dir)) as outputs, tracking(run, outputs) as log:
        yield log


def test_every_step_is_logged_once_everywhere(
    config: MakeConfig, console: Console, memory: type[Memory]
) -> None:
    run = config("tracking.trackers=[memory]", "evaluation.every_n_steps=1")
    train(run, console)
    lines = [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 1, 2]
    assert [step for step, _ in memory.rows] == [0, 1, 2]
    assert [row for _, row in memory.rows] == lines
    assert "eval_avg_test_pass_rate" in lines[0]
    assert "training_step/loss" in lines[0]
    assert "eval_avg_test_pass_rate" in lines[2]
    assert all(name.startswith(("eval_", "inference/")) for name in lines[2]), "no step was made after the last"
    assert memory.settings["optimizer.learning_rate"] == run.optimizer.learning_rate
    assert memory.finished


def test_what_is_not_finite_is_null_in_strict_json(config: MakeConfig) -> None:
    run = config()
    with opened(run) as log:
        log(0, {"a": float("nan"), "b": float("inf"), "c": 0.1})
    (line,) = (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "a": None, "b": None, "c": 0.1}


def test_trackers_are_closed_when_training_fails(config: MakeConfig, memory: type[Memory]) -> None:
    with pytest.raises(RuntimeError, match="stop"), opened(config("tracking.trackers=[memory]")):
        raise RuntimeError("stop")
    assert memory.finished


def test_an_unknown_tracker_is_answered_with_the_nearest(config: MakeConfig) -> None:
    with (
        pytest.raises(
            ConfigError, match="accelerate knows no tracker 'tensorbord'; did you mean tensorboard"
        ),
        opened(config("tracking.trackers=[tensorbord]")),
    ):
        pass


def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    config: MakeConfig, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Memory) -> None:
        raise ModuleNotFoundError("No module named 'memory'")

    monkeypatch.setattr(Memory, "start", start)
    with (
        pytest.raises(ConfigError, match=r"memory is not installed .* pip install 'grpo-regress\[memory\]'"),
        opened(config("tracking.trackers=[memory]")),
    ):
        pass
