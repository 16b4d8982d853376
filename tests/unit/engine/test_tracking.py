"""Metrics go to metrics.jsonl and to every tracker that is named; no tracker can stop, slow or change the training."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console

from regress.dump.metrics_file import metrics_of, read_metrics, read_rows
from regress.engine.config.config_schema import Config
from regress.engine.tracking.metrics_log import TrackedLog
from regress.engine.tracking.run_identity import Wishes
from regress.engine.tracking.tracker_backup import Backup
from regress.engine.tracking.tracker_state import read_sync_state
from regress.engine.training_run import train
from regress.errors import RegressError

MakeConfig = Callable[..., Config]


class Memory(GeneralTracker):
    """Keeps what it is given; ``fault`` is called with the name of each call, and may raise or hang."""

    name = "memory"
    requires_logging_directory = False
    rows: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []
    settings: ClassVar[dict[str, Any]] = {}
    calls: ClassVar[list[str]] = []
    fault: ClassVar[Callable[[str], object]] = staticmethod(lambda call: None)

    def __init__(self, run_name: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        type(self).settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._called("log")
        self.rows.append((step, dict(values)))
        values.clear()  # what a tracker does with its values is its own affair

    def finish(self) -> None:
        self._called("finish")

    def _called(self, call: str) -> None:
        self.calls.append(call)
        type(self).fault(call)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "memory", Memory)
    monkeypatch.setattr(Memory, "fault", staticmethod(lambda call: None))
    Memory.rows.clear()
    Memory.calls.clear()
    return Memory


@pytest.fixture
def hanging(memory: type[Memory], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``hanging(call)``: the tracker never returns from this call until the test is over."""
    over = threading.Event()

    def hang_in(call: str) -> None:
        def fault(called: str) -> None:
            if called == call:
                over.wait(60)

        monkeypatch.setattr(Memory, "fault", staticmethod(fault))

    yield hang_in
    over.set()


def raise_in(call: str, error: BaseException) -> Callable[[str], None]:
    def fault(called: str) -> None:
        if called == call:
            raise error

    return fault


class Run:
    """Log of a run in a directory, with the warnings that it gave."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.folder = folder
        self.limits = {"finish_timeout": 30.0, **limits}
        self.warnings: list[str] = []

    def open(self, **keys: Any) -> TrackedLog:
        self.folder.mkdir(exist_ok=True)
        wishes = Wishes(name="run", output_dir=self.folder, **keys)
        return TrackedLog(wishes, ["memory"], warn=self.warnings.append, **self.limits)

    def backups(self) -> list[dict[str, Any]]:
        return [metrics_of(row) for row in Backup(self.folder).rows("memory")]

    def metrics(self) -> list[dict[str, Any]]:
        return [metrics_of(row) for row in read_metrics(self.folder / "metrics.jsonl")]


def test_every_step_and_every_update_is_logged_once_everywhere(
    config: MakeConfig, console: Console, memory: type[Memory]
) -> None:
    run = config("tracking.trackers=[memory]", "evaluation.every_n_steps=1", "trainer.mini_batch_size=4")
    train(run, console)
    path = Path(run.output_dir) / "metrics.jsonl"
    assert [(row["step"], row.get("update")) for row in read_metrics(path)] == [
        *[(0, None), (0, 0), (0, 1)],
        *[(1, None), (1, 2), (1, 3)],
        (2, None),
    ]
    rows = read_rows(path)
    assert [row.get("update", row["step"]) for row in rows] == [step for step, _ in memory.rows]
    assert [metrics_of(row) for row in rows] == [row for _, row in memory.rows]
    assert memory.settings["optimizer.learning_rate"] == run.optimizer.learning_rate
    assert memory.calls[-1] == "finish"


def test_what_is_not_finite_is_null_in_the_file_and_nan_in_a_tracker(
    tmp_path: Path, memory: type[Memory]
) -> None:
    run = Run(tmp_path)
    with run.open() as log:
        log.log({"a": float("nan"), "b": float("inf"), "c": 0.1}, step=0)
    assert run.metrics() == [{"a": None, "b": None, "c": 0.1}]
    assert str(memory.rows) == "[(0, {'a': nan, 'b': nan, 'c': 0.1})]"


def test_trackers_are_closed_when_training_fails(tmp_path: Path, memory: type[Memory]) -> None:
    log = Run(tmp_path).open()
    log.log({"a": 1.0}, step=0)
    log.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert memory.calls == ["start", "log", "finish"]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1), ValueError("gone")])
def test_a_tracker_that_raises_is_one_warning_and_its_rows_are_kept(
    call: str, error: BaseException, tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "fault", staticmethod(raise_in(call, error)))
    run = Run(tmp_path)
    with run.open() as log:
        for step in range(3):
            log.log({"a": float(step)}, step=step)
    (sentence,) = run.warnings
    assert "tracker memory" in sentence
    assert "training goes on" in sentence
    assert type(error).__name__ in sentence
    sent = {"a": 0.0}, {"a": 1.0}, {"a": 2.0}
    assert run.metrics() == [*sent]
    assert run.backups() == ([] if call == "finish" else [*sent])
    state = read_sync_state(tmp_path)
    assert state is not None
    assert state["trackers"]["memory"]["backed_up"] == len(run.backups())


def test_a_tracker_that_recovers_takes_the_rows_that_follow(
    tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(call: str) -> None:
        if call == "log" and memory.calls.count("log") == 2:
            raise ConnectionError("for a moment")

    monkeypatch.setattr(Memory, "fault", staticmethod(fault))
    run = Run(tmp_path)
    with run.open() as log:
        for step in range(4):
            log.log({"a": float(step)}, step=step)
    assert [row["a"] for _, row in memory.rows] == [0.0, 2.0, 3.0]
    assert run.backups() == [{"a": 1.0}]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_hangs_holds_up_nothing(
    call: str, tmp_path: Path, hanging: Callable[[str], None]
) -> None:
    hanging(call)
    run = Run(tmp_path, queue_size=2, finish_timeout=0.2)
    with run.open() as log:
        for step in range(6):
            log.log({"a": float(step)}, step=step)
            if call == "finish":
                while log.status()["trackers"]["memory"]["waiting"]:
                    time.sleep(0.001)
    assert [row["a"] for row in run.metrics()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(run.warnings) == 1
    kept = [] if call == "finish" else [{"a": float(step)} for step in range(6)]
    assert run.backups() == kept
    state = read_sync_state(tmp_path)
    assert state is not None
    assert state["trackers"]["memory"]["state"] == "abandoned"


def test_a_full_disk_for_the_backup_stops_nothing_either(
    tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Memory, "fault", staticmethod(raise_in("log", ValueError("gone"))))
    monkeypatch.setattr(Backup, "_write", full)
    run = Run(tmp_path)
    with run.open() as log:
        log.log({"a": 1.0}, step=0)
    assert len(run.warnings) == 1
    assert log.status()["trackers"]["memory"]["lost"] == 1


def test_trackers_change_no_bit_of_the_training(
    config: MakeConfig,
    console: Console,
    memory: type[Memory],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Not even one that draws from every generator of the process, changes its seeds, and fails."""

    def fault(call: str) -> None:
        random.seed(7)
        torch.manual_seed(7)
        torch.rand(3)
        raise ValueError("gone")

    monkeypatch.setattr(Memory, "fault", staticmethod(fault))
    weights, rows = [], []
    for name, trackers in (("alone", "[]"), ("tracked", "[memory]")):
        run = tmp_path / name
        train(config(f"output_dir={run}", f"tracking.trackers={trackers}"), console)
        weights.append((run / "final" / "model.safetensors").read_bytes())
        rows.append([metrics_of(row) for row in read_rows(run / "metrics.jsonl")])
    assert rows[0] == rows[1]
    assert weights[0] == weights[1]
    assert len(Backup(run).rows("memory")) == len(rows[1])


def test_a_resume_goes_on_in_the_same_run_as_a_new_segment(tmp_path: Path, memory: type[Memory]) -> None:
    """Rows that the first process logged beyond its checkpoint are logged again, and read once."""
    first = Run(tmp_path).open()
    for step in range(3):
        first.log({"a": float(step)}, step=step)
        if step == 0:
            state = json.loads(json.dumps(first.state_dict()))
    first.finish()
    second = Run(tmp_path).open()
    second.load_state_dict(state)
    second.resumed("checkpoint-1", step=1, update=1)
    with second:
        for step in range(1, 4):
            second.log({"a": float(step)}, step=step)
    assert [row["a"] for row in Run(tmp_path).metrics()] == [0.0, 1.0, 2.0, 3.0]
    assert second.status()["run_id"] == state["run_id"]
    assert second.status()["segment"] == 1
    start = next(row for row in read_rows(tmp_path / "metrics.jsonl") if "after" in row)
    assert (start["resumed_from"], start["step"], start["after"]) == ("checkpoint-1", 1, 0)


def test_rows_that_a_kill_kept_from_a_tracker_are_sent_after_the_resume(
    tmp_path: Path, memory: type[Memory], hanging: Callable[[str], None]
) -> None:
    """Nothing is dropped: the checkpoint knows rows that the tracker had not taken when the process died."""
    with Run(tmp_path).open() as log:
        log.log({"a": 0.0}, step=0)
    hanging("log")
    killed = Run(tmp_path).open(run_id=log.status()["run_id"])
    killed.load_state_dict(log.state_dict())
    killed.resumed("checkpoint-1", step=1, update=1)
    for step in (1, 2):
        killed.log({"a": float(step)}, step=step)
    while memory.calls.count("log") < 2:
        time.sleep(0.001)
    state = killed.state_dict()  # and then the process is gone, the queue with it
    assert [row["a"] for _, row in memory.rows] == [0.0]
    Memory.fault = staticmethod(lambda call: None)  # type: ignore[assignment]
    with Run(tmp_path).open() as last:
        last.load_state_dict(state)
        last.resumed("checkpoint-3", step=3, update=3)
        last.state_dict()  # the program asks for the run id before its first row
        last.log({"a": 3.0}, step=3)
    assert [row["a"] for _, row in memory.rows] == [0.0, 1.0, 2.0, 3.0]


def test_a_state_of_another_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegressError, match=r"has the schema version 9 .* reads version 1"):
        Run(tmp_path).open().load_state_dict({"schema_version": 9})


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "wandb_sync_state.json").write_text("{")
    with pytest.raises(RegressError, match=r"wandb_sync_state\.json is damaged; delete it"):
        read_sync_state(tmp_path)
