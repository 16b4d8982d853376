"""A tiny run with checkpoints, made once and copied by each test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regress.dump.dump_files import file_stamp
from regress.engine.checkpoint.checkpoint_manifest import read_manifest, write_manifest
from regress.engine.config import load_config
from regress.engine.training_run import RunResult, train

TINY = (
    "max_steps=2",
    "task.train_size=12",
    "task.eval_size=4",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "model.config={hidden_size: 32, intermediate_size: 64}",
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
    "trainer.mini_batch_size=4",
    "tracking.trackers=[]",
    "trainer.save_updates=1",
)
"""Two steps of two updates, with a checkpoint after each update."""


class Case:
    """A run that has ended, or was killed after one of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, name: str = "checkpoint-1") -> Path:
        return self.folder / name

    def run(self, *overrides: str, allow: tuple[str, ...] = ()) -> RunResult:
        given = [*TINY, f"output_dir={self.folder}", *overrides]
        return train(load_config(overrides=given, environ={}).config, Console(quiet=True), allow_change=allow)

    def resume(self, *overrides: str, name: str = "checkpoint-1", allow: tuple[str, ...] = ()) -> RunResult:
        asked = f"trainer.resume_from_checkpoint={self.checkpoint(name)}"
        return self.run(asked, *overrides, allow=allow)

    def seal(self, name: str = "checkpoint-1") -> None:
        """Let the manifest tell of the files as they are now, as a forger would."""
        folder = self.checkpoint(name)
        listed = [path for path in folder.rglob("*") if path.is_file() and path != folder / "manifest.json"]
        write_manifest(folder, {path.relative_to(folder).as_posix(): file_stamp(path) for path in listed})

    def change_state(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.checkpoint() / "regress_state.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))
        self.seal()

    def files(self) -> dict[str, str]:
        """Hash of every file of every checkpoint."""
        found = {}
        for folder in sorted(self.folder.glob("checkpoint-*")):
            if (folder / "manifest.json").is_file():
                found |= {
                    f"{folder.name}/{name}": stamp.sha256 for name, stamp in read_manifest(folder).items()
                }
        return found


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    Case(folder).run()
    return folder


@pytest.fixture
def case(finished: Path, tmp_path: Path) -> Case:
    """A copy of the finished run, which may be broken."""
    return Case(Path(shutil.copytree(finished, tmp_path / "run")))
