"""Stages of a curriculum: which problems they hold, and what ends them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regress.errors import TaskError
from regress.tasks.difficulty_vocabulary import HIGHEST, complexity_number, in_range, level_name, level_number
from regress.tasks.name_suggestions import nearest
from regress.tasks.problem import Problem

KEY = "curriculum.stages"
FIELDS = ("name", "levels", "complexity", "threshold", "min_evaluations", "min_steps", "full_pass")


@dataclass(frozen=True)
class Stage:
    """One stage of a curriculum.

    Attributes:
        levels: levels of its problems, ascending; empty: all.
        complexity: lowest and highest complexity of its problems, both included; None: any.
        threshold: pass rate of the first round that ends it, as the mean of the last evaluations.
        min_evaluations: least number of evaluations in it.
        min_steps: least number of rollout steps in it.
        full_pass: True if each of its problems must have been trained on once.
    """

    name: str
    levels: tuple[int, ...]
    complexity: tuple[float, float] | None
    threshold: float
    min_evaluations: int
    min_steps: int
    full_pass: bool

    def admits(self, problem: Problem) -> bool:
        """Return True if a problem belongs to the stage.

        Raises:
            TaskError: if the problem does not tell what the stage asks for.
        """
        if self.levels:
            if problem.level is None:
                raise _untold(problem, self, "level")
            if problem.level not in self.levels:
                return False
        if self.complexity is None:
            return True
        if problem.complexity is None:
            raise _untold(problem, self, "complexity")
        return in_range(problem.complexity, self.complexity)

    def described(self) -> dict[str, Any]:
        """Return the stage as a file of a curriculum's state tells it."""
        return {
            "name": self.name,
            "dataset_levels": [level_name(level) for level in self.levels],
            "complexity_range": None if self.complexity is None else list(self.complexity),
            "performance_threshold": self.threshold,
            "min_evaluations": self.min_evaluations,
            "min_steps": self.min_steps,
            "full_pass": self.full_pass,
        }


DEFAULT_STAGES: tuple[Mapping[str, Any], ...] = (
    {
        "name": "foundation",
        "levels": ["basic"],
        "complexity": [0, 3],
        "threshold": 0.65,
        "min_steps": 20,
    },
    {
        "name": "elementary",
        "levels": ["basic", "intermediate"],
        "complexity": [0, 5],
        "threshold": 0.60,
        "min_steps": 25,
    },
    {
        "name": "intermediate",
        "levels": ["intermediate"],
        "complexity": [3, 7],
        "threshold": 0.55,
        "min_steps": 30,
    },
    {
        "name": "advanced",
        "levels": ["intermediate", "advanced"],
        "complexity": [5, 9],
        "threshold": 0.50,
        "min_steps": 35,
    },
    {
        "name": "expert",
        "levels": ["advanced", "expert"],
        "complexity": [7, 10],
        "threshold": 0.45,
        "min_steps": 40,
    },
    {
        "name": "comprehensive",
        "levels": ["basic", "intermediate", "advanced", "expert", "master"],
        "complexity": [0, 10],
        "threshold": 0.40,
        "min_steps": 50,
    },
)
"""Stages of a curriculum for which none are given: they need problems of five levels."""


def read_stages(
    given: Sequence[Any] | None, thresholds: Mapping[str, float], *, min_evaluations: int, full_pass: bool
) -> tuple[Stage, ...]:
    """Return the stages of a configuration.

    Args:
        given: a mapping for each stage, see `FIELDS`; None for `DEFAULT_STAGES`.
        thresholds: by the name of a stage, in place of its own.
        min_evaluations: that of stages which do not tell.
        full_pass: that of stages which do not tell.

    Raises:
        TaskError: naming the stage and field that cannot be.
    """
    if given is not None and not given:
        raise TaskError(f"{KEY} is empty; give at least one stage, or null for the six default ones")
    found: list[Stage] = []
    for index, entry in enumerate(DEFAULT_STAGES if given is None else given):
        stage = _stage(f"{KEY}[{index}]", entry, thresholds, min_evaluations, full_pass)
        if stage.name in (known.name for known in found):
            raise TaskError(f"{KEY}[{index}]: there are two stages named {stage.name!r}; rename one")
        found.append(stage)
    for name in thresholds:
        if name not in (stage.name for stage in found):
            known = [stage.name for stage in found]
            raise TaskError(f"curriculum.thresholds: there is no stage {name!r}; {nearest(name, known)}")
    return tuple(found)


def _stage(
    where: str, entry: Any, thresholds: Mapping[str, float], min_evaluations: int, full_pass: bool
) -> Stage:
    if not isinstance(entry, Mapping):
        raise TaskError(f"{where} is {entry!r}; a stage is a mapping with the keys {', '.join(FIELDS)}")
    for key in entry:
        if key not in FIELDS:
            raise TaskError(f"{where}: a stage has no key {key!r}; {nearest(str(key), FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise TaskError(f"{where} needs a name")
    threshold = thresholds.get(name, entry.get("threshold"))
    return Stage(
        name,
        _levels(where, entry.get("levels", [])),
        _range(where, entry.get("complexity")),
        _threshold(f"{where} ({name})", threshold),
        _count(where, "min_evaluations", entry.get("min_evaluations", min_evaluations), 1),
        _count(where, "min_steps", entry.get("min_steps", 0), 0),
        _flag(where, "full_pass", entry.get("full_pass", full_pass)),
    )


def _levels(where: str, levels: Any) -> tuple[int, ...]:
    if not isinstance(levels, list):
        raise TaskError(
            f"{where}: levels={levels!r} must be a list such as [basic, intermediate]; [] for all"
        )
    return tuple(sorted({level_number(level, f"{where}: levels") for level in levels}))


def _range(where: str, bounds: Any) -> tuple[float, float] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise TaskError(f"{where}: complexity={bounds!r} must be [lowest, highest]; null for any")
    low, high = (complexity_number(bound, f"{where}: complexity") for bound in bounds)
    if low > high:
        raise TaskError(f"{where}: complexity=[{low:g}, {high:g}] has its ends in the wrong order; swap them")
    return low, high


def _threshold(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise TaskError(f"{where}: threshold={value!r} must be a pass rate greater than 0 and at most 1")
    return float(value)


def _count(where: str, name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise TaskError(f"{where}: {name}={value!r} must be a whole number of at least {minimum}")
    return value


def _flag(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TaskError(f"{where}: {name}={value!r} must be true or false")
    return value


def _untold(problem: Problem, stage: Stage, what: str) -> TaskError:
    return TaskError(f"""problem {problem.task_id} ({problem.prompt!r}) has no {what}, which stage {stage.name!r} of the
    curriculum asks for; give every problem a {what}, or leave it out of {KEY}""")


def problems_of(
    stages: Sequence[Stage], problems: Sequence[Problem], least: int, key: str
) -> list[tuple[Problem, ...]]:
    """Return the problems of each stage.

    Args:
        least: number of problems that every stage needs.
        key: configuration key that makes them more, for the error.

    Raises:
        TaskError: if a stage has fewer problems; nothing takes their place.
    """
    found = [tuple(problem for problem in problems if stage.admits(problem)) for stage in stages]
    for stage, own in zip(stages, found, strict=True):
        if len(own) < max(least, 1):
            levels = ", ".join(map(level_name, stage.levels)) or "any level"
            low, high = stage.complexity or (0.0, HIGHEST)
            raise TaskError(f"""stage {stage.name!r} of the curriculum ({levels}, complexity {low:g} to {high:g}) has
            {len(own)} of {len(problems)} problems, but needs {max(least, 1)}; raise {key}, or widen the stage in
            {KEY}""")
    return found


def levels_of(stages: Sequence[Stage]) -> tuple[int, ...] | None:
    """Return all levels that the stages name, ascending; None if one of them takes any level."""
    if not all(stage.levels for stage in stages):
        return None
    return tuple(sorted({level for stage in stages for level in stage.levels}))


def mean(values: Sequence[float]) -> float:
    """Return the mean of pass rates, summed exactly."""
    return math.fsum(values) / len(values)
