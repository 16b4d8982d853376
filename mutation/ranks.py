"""Functions that ranks of a replay run: with a mutant, or noting which lines they reach."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mutation.mutants import ROOT, Mutant, install
from regress.engine.config import load_config
from regress.engine.config.schema import Config
from regress.parallel.launch.launchers import Launch
from regress.replay.pool import shared_pool
from regress.replay.run import run_steps

Lines = dict[str, set[int]]
"""Lines of each file, from the root of the repository."""


@dataclass(frozen=True)
class Mutated(Launch):
    """Starts the ranks of a replay like the pool, each with a mutant."""

    launcher: str = "pool"
    mutant: Mutant | None = None

    def run(self, config: Path, world_size: int, folder: Path, what: str) -> None:
        """Run all ranks."""
        arguments = {"config": _loaded(config), "mutant": self.mutant}
        shared_pool().run(
            run_mutated,
            arguments,
            world_size,
            folder=folder,
            what=what,
            timeout=self.timeout,
            patience=self.timeout / 2,
        )


@dataclass(frozen=True)
class Traced(Launch):
    """Starts the ranks of a replay like the pool, and keeps which lines of some files they reach."""

    launcher: str = "pool"
    paths: tuple[str, ...] = ()
    lines: Lines = field(default_factory=dict)

    def run(self, config: Path, world_size: int, folder: Path, what: str) -> None:
        """Run all ranks."""
        arguments = {"config": _loaded(config), "paths": self.paths}
        for lines in shared_pool().run(run_traced, arguments, world_size, folder=folder, what=what):
            for path, found in lines.items():
                self.lines.setdefault(path, set()).update(found)


def run_mutated(config: Config, mutant: Mutant) -> None:
    """Run all steps on a rank with a mutant."""
    install(mutant)
    run_steps(config)


def run_traced(config: Config, paths: Collection[str]) -> Lines:
    """Run all steps on a rank and return the lines that it reached."""
    files = {str(ROOT / path): path for path in paths}
    lines: Lines = {path: set() for path in paths}

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[files[frame.f_code.co_filename]].add(frame.f_lineno)
        return inside

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return inside if frame.f_code.co_filename in files else None

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        run_steps(config)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return lines


def _loaded(config: Path) -> Config:
    return load_config(config_path=str(config), environ={}).config
