"""Registry of tasks by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from regress.errors import TaskError
from regress.tasks.difficulty_levels import FAMILIES, resolve
from regress.tasks.name_suggestions import nearest
from regress.tasks.portable_draws import generator
from regress.tasks.problem import Problem
from regress.tasks.problem_sizes import Params
from regress.tasks.prompt_strata import draw
from regress.tasks.user_tasks import make_own_task

GYM = "reasoning_gym/"


class Task(Protocol):
    """Seeded source of problems. Drawing has no side effects: the same call gives the same problems."""

    @property
    def name(self) -> str:
        """The name given to `make_task`."""
        ...

    @property
    def level(self) -> int | None:
        """The difficulty level, from 1 up; None for a mixture."""
        ...

    @property
    def size(self) -> int | None:
        """The number of problems of a finite collection; None for a generator."""
        ...

    def draw(self, count: int) -> list[Problem]:
        """Return `count` problems with distinct prompts, in random order; fewer if there are no more."""
        ...


@dataclass(frozen=True)
class BuiltinTask:
    """Task of `levels.FAMILIES`, with all its parameters."""

    name: str
    level: int
    params: Params
    seed: int

    @property
    def size(self) -> int | None:
        """None: problems are generated."""
        return None

    def draw(self, count: int) -> list[Problem]:
        """Implement `Task.draw`."""
        family = FAMILIES[self.name]
        pairs = draw(list(family.strata(**self.params)), count, generator("task", self.name, self.seed))
        return [
            Problem(self.name, *pair, self.level, family.solution(*pair), family.complexity(pair[0]))
            for pair in pairs
        ]


def task_names() -> tuple[str, ...]:
    """Return the names of the built-in tasks."""
    return tuple(sorted(FAMILIES))


def make_task(name: str, level: int = 1, params: Mapping[str, Any] | None = None, seed: int = 0) -> Task:
    """Return the task `name` (built-in, "reasoning_gym/<dataset>", or "package.module:function") at a level.

    `params` override single values of the level. Raises TaskError, naming the nearest valid choice, for an
    unknown name, level or parameter, and for a value out of range.
    """
    if name.startswith(GYM):
        from regress.tasks.reasoning_gym import make_gym_task  # the optional extra loads only when asked for

        return make_gym_task(name.removeprefix(GYM), level, params or {}, seed)
    if ":" in name:
        return make_own_task(name, level, params or {}, seed)
    if name not in FAMILIES:
        raise TaskError(
            f"task.name: there is no task {name!r}; {nearest(name, FAMILIES)} "
            f"(datasets of the optional reasoning-gym are named {GYM}<dataset>, your own task is named by its path, "
            '"package.module:function", and task.dataset_path names a file)'
        )
    return BuiltinTask(name, level, resolve(name, level, params or {}), seed)
