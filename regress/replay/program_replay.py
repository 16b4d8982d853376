"""Replay by the whole program: the loop of ``regress train``, perhaps ended at a checkpoint and gone on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from regress.dump.dump_files import write_atomically
from regress.dump.formats import format_named
from regress.dump.recorded_trajectories import read_trajectories
from regress.dump.trajectory import to_record
from regress.engine.checkpoint.checkpoint_saver import Stopped
from regress.engine.config.config_schema import Config
from regress.engine.data_components import make_material
from regress.engine.prompt_tokens import Prompts
from regress.errors import ReplayError
from regress.golden.golden_case import GoldenCase
from regress.parallel.parallel_run import train
from regress.replay.replay_configuration import case_config, compose, replay_config
from regress.replay.replay_plan import world_size
from regress.replay.replay_pool import shared_pool, standstill_of
from regress.replay.run_changes import Around
from regress.replay.variant import Precision, Variant
from regress.tasks.curriculum import CurriculumPosition
from regress.tasks.problem import Problem
from regress.tasks.problem_split import TRAIN_SIZE
from regress.tasks.task_registry import make_task

FORMAT = format_named("safetensors")
DRAWN = ("name", "level", "params", "train_size", "eval_size")
"""Keys of a task whose place the file of problems takes."""


def staged(case: GoldenCase, folder: Path, steps: int) -> dict[str, Any]:
    """Write the problems and the rollouts of a case as those of a curriculum, and return the configuration of it.

    The stages are gone through from the last to the first, so that a program which chooses them by itself is wrong at
    its first step.

    Raises:
        ReplayError: for a case without prompts of its own, or one that trains on a prompt twice.
    """
    config = compose(case.config, case_config(case, steps), folder / "unstaged")
    prompts = make_material(config).prompts
    planned = [[prompt.problem for prompt in prompts.train(step)] for step in range(steps)]
    _require_distinct(case, planned)
    recording = folder / "staged"
    for step, found in read_trajectories(case.folder / "trajectories").items():
        if step < steps:
            record = to_record(
                found.trajectories, step, {**found.meta, "curriculum": vars(_place(step, steps))}
            )
            write_atomically(recording / f"{record.where.stem}.{FORMAT.name}", FORMAT.encode(record))
    problems = folder / "problems.jsonl"
    overrides = _overrides(case, problems, recording, steps)
    _write(problems, planned)
    laid = compose(case.config, case_config(case, steps) | overrides, folder / "unordered")
    _write(problems, _reordered(planned, make_material(laid).prompts))
    return overrides


def _place(step: int, steps: int) -> CurriculumPosition:
    return CurriculumPosition(stage=steps - 1 - step, round=1, start_step=step)


def _overrides(case: GoldenCase, problems: Path, recording: Path, steps: int) -> dict[str, Any]:
    task: Any = case.config.get("task") or {}
    kept = {key: value for key, value in task.items() if key not in DRAWN}
    stages = [{"name": f"stage{stage}", "levels": [stage + 1], "threshold": 0.01} for stage in range(steps)]
    return {
        "task": {**kept, "dataset_path": str(problems), "eval_size": 0},
        "rollout_worker.trajectory_load_path": str(recording),
        "curriculum.enable": True,
        "curriculum.stages": stages,
        "curriculum.min_evaluations": 1,
        "curriculum.full_pass": False,
        "curriculum.judged_on": "all",
    }


def _require_distinct(case: GoldenCase, planned: Sequence[Sequence[Problem]]) -> None:
    texts = [problem.prompt for step in planned for problem in step]
    if not texts or len({*texts}) < len(texts):
        raise ReplayError(f"""{case.name} trains on {len({*texts})} different prompts in {len(texts)} places, but a
        prompt of a curriculum belongs to the stage of one step; leave the variants with a curriculum out""")


def _write(path: Path, planned: Sequence[Sequence[Problem]]) -> None:
    """Write the problems of each step as those of its stage's level."""
    rows = [
        {
            "prompt": problem.prompt if problem.tokens is None else list(problem.tokens),
            "answer": problem.answer,
            "level": _place(step, len(planned)).stage + 1,
        }
        for step, problems in enumerate(planned)
        for problem in problems
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _reordered(planned: Sequence[Sequence[Problem]], prompts: Prompts) -> list[list[Problem]]:
    """Return the problems in the order in which a file must hold them to be drawn in that of the recording.

    The order of a draw depends on the places of the rows alone.
    """
    prompts.follow(lambda step: _place(step, len(planned)))
    found = []
    for step, problems in enumerate(planned):
        texts = [problem.prompt for problem in problems]
        row = [problems[0]] * len(problems)
        for problem, drawn in zip(problems, prompts.train(step), strict=True):
            row[texts.index(drawn.problem.prompt)] = problem
        found.append(row)
    return found


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
        raise ReplayError(f"""{case.name}/{variant.name} makes no more than {variant.resume_at} updates, so nobody goes
        on; lower resume_at""")
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
            raise ReplayError("""a fault of a run that was built cannot break the whole program, which builds its own;
            choose one of the code""")
        try:
            train(config, Console(quiet=True), stop_after=stop_after)
        except Stopped:
            return True
    return False
