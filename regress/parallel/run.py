"""Run on as many ranks as its configuration asks for."""

from __future__ import annotations

from rich.console import Console

from regress.engine import run
from regress.engine.config.schema import Config
from regress.parallel.world import opened_world


def train(config: Config, console: Console) -> run.RunResult:
    """Run `regress.engine.run.train` on this rank, among those that a launcher has started.

    Raises:
        RegressError: whatever a user can mend, in one sentence.
    """
    with opened_world(config) as world:
        return run.train(config, console, world)
