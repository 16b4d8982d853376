"""Recorded rollouts retold as those of a curriculum: each step has a stage, which holds the step's own problems.

The values of a case are then those of a run with a curriculum that goes where its recording says. Any other stage at
any step has other prompts, which a replay refuses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regress.dump.files import write_atomically
from regress.dump.formats import format_named
from regress.dump.recorded import read_trajectories
from regress.dump.trajectory import to_record
from regress.engine.material import make_material
from regress.engine.prompts import Prompts
from regress.errors import ReplayError
from regress.golden.case import GoldenCase
from regress.replay.configure import case_config, compose
from regress.tasks.curriculum import Place
from regress.tasks.problem import Problem

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
    wanted = [[prompt.problem for prompt in prompts.train(step)] for step in range(steps)]
    _require_distinct(case, wanted)
    recording = folder / "staged"
    for step, found in read_trajectories(case.folder / "trajectories").items():
        if step < steps:
            record = to_record(
                found.trajectories, step, {**found.meta, "curriculum": vars(_place(step, steps))}
            )
            write_atomically(recording / f"{record.where.stem}.{FORMAT.name}", FORMAT.encode(record))
    problems = folder / "problems.jsonl"
    overrides = _overrides(case, problems, recording, steps)
    _write(problems, wanted)
    laid = compose(case.config, case_config(case, steps) | overrides, folder / "unordered")
    _write(problems, _reordered(wanted, make_material(laid).prompts))
    return overrides


def _place(step: int, steps: int) -> Place:
    return Place(stage=steps - 1 - step, round=1, start_step=step)


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


def _require_distinct(case: GoldenCase, wanted: Sequence[Sequence[Problem]]) -> None:
    texts = [problem.prompt for step in wanted for problem in step]
    if not texts or len({*texts}) < len(texts):
        raise ReplayError(
            f"{case.name} trains on {len({*texts})} different prompts in {len(texts)} places, but a prompt of a "
            "curriculum belongs to the stage of one step; leave the variants with a curriculum out"
        )


def _write(path: Path, wanted: Sequence[Sequence[Problem]]) -> None:
    """Write the problems of each step as those of its stage's level."""
    rows = [
        {
            "prompt": problem.prompt if problem.tokens is None else list(problem.tokens),
            "answer": problem.answer,
            "level": _place(step, len(wanted)).stage + 1,
        }
        for step, problems in enumerate(wanted)
        for problem in problems
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _reordered(wanted: Sequence[Sequence[Problem]], prompts: Prompts) -> list[list[Problem]]:
    """Return the problems in the order in which a file must hold them to be drawn in that of the recording.

    The order of a draw depends on the places of the rows alone.
    """
    prompts.follow(lambda step: _place(step, len(wanted)))
    found = []
    for step, problems in enumerate(wanted):
        texts = [problem.prompt for problem in problems]
        row = [problems[0]] * len(problems)
        for problem, drawn in zip(problems, prompts.train(step), strict=True):
            row[texts.index(drawn.problem.prompt)] = problem
        found.append(row)
    return found
