"""Replay by the whole program: the loop of ``regress train``, perhaps ended at a checkpoint and gone on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from regress.engine.checkpoint.saver import Stopped
from regress.engine.config.schema import Config
from regress.errors import ReplayError
from regress.golden.case import GoldenCase
from regress.parallel.run import train
from regress.replay.around import Around
from regress.replay.configure import compose, replay_config
from regress.replay.pool import shared_pool, standstill_of
from regress.replay.size import world_size
from regress.replay.staged import staged
from regress.replay.variants import Precision, Variant
from regress.tasks.dataset import TRAIN_SIZE
from regress.tasks.registry import make_task

HELD_OUT = 3
"""Problems that are evaluated."""


def replay_program(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    folder: Path,
    steps: int,
    overrides: Mapping[str, Any] | None = None,
    around: Around | None = None,
) -> str:
    """Replay a case in one process, or in two of which the second goes on from the first one's checkpoint.

    Each may be several ranks. All record into one dump, whose place is returned. The context of ``around`` is
    around each.

    Raises:
        RegressError: if a process fails, or the first one leaves no update to the second.
    """
    quiet = {"tracking.trackers": [], **(overrides or {})}
    if variant.overrides.get("curriculum.enable"):
        quiet |= staged(case, folder, steps)
    if variant.overrides.get("evaluation.every_n_steps"):
        quiet["task.eval_path"] = str(_held_out(case, folder / "held_out.jsonl"))
    if variant.resume_at is None:
        return _process(case, variant, precision, folder, steps, {**quiet, **variant.overrides}, around)[0]
    saving = {**quiet, "trainer.save_updates": variant.resume_at}
    first = variant if variant.before is None else replace(variant, overrides=variant.before)
    if not _process(case, first, precision, folder, steps, saving, around, stop_after=variant.resume_at)[1]:
        raise ReplayError(
            f"{case.name}/{variant.name} makes no more than {variant.resume_at} updates, so nobody goes on; lower "
            "resume_at"
        )
    going_on = {**saving, "trainer.resume_from_checkpoint": "latest"}
    return _process(case, variant, precision, folder, steps, going_on, around)[0]


def _held_out(case: GoldenCase, path: Path) -> Path:
    """Write a file of problems of a case's task that it is not trained on, and return it."""
    config = compose(case.config, {}, path.parent)
    chosen, size = config.task, config.task.train_size or TRAIN_SIZE
    task = make_task(str(chosen.name), chosen.level, chosen.params, config.seed)
    trained = {problem.prompt for problem in task.draw(size)}
    others = [problem for problem in task.draw(3 * size) if problem.prompt not in trained]
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in others[:HELD_OUT]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _process(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    folder: Path,
    steps: int,
    overrides: Mapping[str, Any],
    around: Around | None,
    *,
    stop_after: int | None = None,
) -> tuple[str, bool]:
    """Run the program once, on as many ranks as the variant asks for; return its dump, and True if it was stopped."""
    config = replay_config(case, variant, precision, steps, folder, overrides)
    stopped = shared_pool().run(
        run_program,
        {"config": config, "stop_after": stop_after, "around": around},
        world_size(case.config, variant.overrides),
        standstill=standstill_of(config),
        folder=folder / ("ranks" if stop_after is None else "ranks-before"),
        what=f"{case.name}/{variant.name}{precision.suffix}",
    )
    return config.debug.dump_dir, bool(stopped[0])


def run_program(config: Config, stop_after: int | None, around: Around | None = None) -> bool:
    """Train as ``regress train`` does, on every rank; return True if it was stopped at a checkpoint.

    Raises:
        ReplayError: for a context that changes a run that was built, which the program builds itself.
    """
    with (around or nullcontext)() as broken:
        if broken is not None:
            raise ReplayError(
                "a fault of a run that was built cannot break the whole program, which builds its own; choose one of "
                "the code"
            )
        try:
            train(config, Console(quiet=True), stop_after=stop_after)
        except Stopped:
            return True
    return False
