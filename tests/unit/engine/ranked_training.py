"""A run of several ranks, which import this file by name."""

from __future__ import annotations

from rich.console import Console

from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.parallel.distributed_ranks import opened_world


def trained(config: Config) -> None:
    """Train as one of the ranks of this run."""
    with opened_world(config) as world:
        train(config, Console(quiet=True), world)
