"""A tracker that fills its own disk: the training is what it is without, and what was not taken is in the backup."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from regress.dump.metrics_file import metrics_of, read_rows
from regress.engine.config import load_config
from regress.engine.tracking.tracker_backup import Backup
from regress.engine.tracking.tracker_state import read_sync_state
from regress.engine.training_run import train

pytest.importorskip("tensorboard")

TINY = (
    "max_steps=4",
    "task.train_size=12",
    "task.eval_size=4",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "warm_start.steps=6",
    "warm_start.batch_size=8",
    "trainer.mini_batch_size=4",
    "tracking.finish_timeout=5",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # TensorBoard's own thread dies
def test_a_tracker_whose_disk_is_full_changes_nothing(small_disk: Path, tmp_path: Path) -> None:
    rows, weights, said = {}, {}, {}
    for name, trackers in (("alone", "[]"), ("tracked", "[tensorboard]")):
        run = tmp_path / name
        keys = [f"output_dir={run}", f"tracking.trackers={trackers}", f"tracking.log_dir={small_disk}"]
        console = Console(record=True, quiet=False, width=400, file=(tmp_path / f"{name}.txt").open("w"))
        train(load_config(overrides=[*TINY, *keys], environ={}).config, console)
        console.file.close()
        rows[name] = read_rows(run / "metrics.jsonl")
        weights[name] = (run / "final" / "model.safetensors").read_bytes()
        said[name] = (tmp_path / f"{name}.txt").read_text()
    assert weights["alone"] == weights["tracked"]
    assert [metrics_of(row) for row in rows["alone"]] == [metrics_of(row) for row in rows["tracked"]]
    assert said["tracked"].count("warning: tracker tensorboard") == 1
    state = read_sync_state(tmp_path / "tracked")
    assert state is not None
    delivery = state["trackers"]["tensorboard"]
    kept = Backup(tmp_path / "tracked").rows("tensorboard")
    assert kept
    assert delivery["lost"] == 0
    assert delivery["sent"] + len(kept) >= len(rows["tracked"])
    assert {row["sequence"] for row in kept} >= {
        row["sequence"] for row in rows["tracked"] if row["sequence"] > delivery["acknowledged"]
    }
