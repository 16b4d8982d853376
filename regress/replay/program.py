"""Replay by the whole program: the loop of ``regress train``, ended at a checkpoint and gone on with by another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from regress.engine.checkpoint.saver import Stopped
from regress.engine.config.schema import Config
from regress.errors import ReplayError
from regress.golden.case import GoldenCase
from regress.parallel.run import train
from regress.replay.configure import replay_config
from regress.replay.pool import shared_pool
from regress.replay.size import world_size
from regress.replay.variants import Precision, Variant


def replay_resumed(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    folder: Path,
    steps: int,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Replay a case in two processes, or two groups of them; both record into ``folder/dump``.

    Raises:
        RegressError: if a process fails, or the first one has no update left for the second.
    """
    at = variant.resume_at
    assert at is not None
    first = variant if variant.before is None else replace(variant, overrides=variant.before)
    program = {**(overrides or {}), "trainer.save_updates": at, "tracking.trackers": []}
    again = {**program, "trainer.resume_from_checkpoint": "latest"}
    for number, (process, chosen) in enumerate(((first, program), (variant, again))):
        config = replay_config(case, process, precision, steps, folder, chosen)
        ended = shared_pool().run(
            run_program,
            {"config": config, "stop_after": None if number else at},
            world_size(case.config, process.overrides),
            folder=folder / f"ranks{number}",
            what=f"{case.name}/{variant.name}{precision.suffix}",
        )
        if ended[0] != ("completed" if number else "stopped"):
            raise ReplayError(
                f"{case.name}/{variant.name} makes no more than {at} updates, so nobody goes on; lower resume_at"
            )


def run_program(config: Config, stop_after: int | None) -> str:
    """Train as ``regress train`` does, on every rank; return ``stopped`` or ``completed``."""
    try:
        train(config, Console(quiet=True), stop_after=stop_after)
    except Stopped:
        return "stopped"
    return "completed"
