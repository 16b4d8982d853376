"""Registry of tasks by name; ``package.module:function`` names one of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from regress.errors import TaskError, reason
from regress.tasks.data_rows import RowFields, problem_of
from regress.tasks.difficulty_levels import FAMILIES, resolve
from regress.tasks.name_suggestions import nearest
from regress.tasks.named_functions import named_function
from regress.tasks.portable_draws import generator
from regress.tasks.problem import Problem
from regress.tasks.problem_sizes import Params
from regress.tasks.prompt_strata import draw

_PATIENCE = 20  # rows for each problem wanted, before a function counts as exhausted


@dataclass(frozen=True)
class OwnTask:
    """Function that yields problems: ``function(level=..., seed=..., **task.params)``.

    What it yields are mappings with the fields of `RowFields`, or pairs (prompt, answer); it may go on for ever.
    """

    name: str
    level: int | None
    function: Callable[..., Iterable[object]]
    params: Mapping[str, Any]
    seed: int

    @property
    def size(self) -> int | None:
        """None: nobody knows how many there are."""
        return None

    def draw(self, count: int) -> list[Problem]:
        """Return the first `count` problems with distinct prompts; fewer if 20 rows for each do not hold enough.

        Raises:
            TaskError: if the function fails, or yields what is not a problem.
        """
        found: dict[str, Problem] = {}
        try:
            for number, row in enumerate(self.function(level=self.level, seed=self.seed, **self.params), 1):
                where = f"task.name: {self.name} yielded a row (number {number}) that"
                problem = problem_of(row, RowFields(), self.name, where, level=self.level)
                found.setdefault(problem.prompt, problem)
                if len(found) == count or number == _PATIENCE * count:
                    break
        except TaskError:
            raise
        except (Exception, SystemExit) as error:
            raise TaskError(f"""task.name: {self.name} failed when called with level={self.level}, seed={self.seed} and
            task.params={dict(self.params)} ({reason(error)}); it must yield rows with prompt and answer""") from error
        return list(found.values())


def make_own_task(name: str, level: int, params: Mapping[str, Any], seed: int) -> OwnTask:
    """Return the task of a path "package.module:function".

    Raises:
        TaskError: if the path must not (see `regress.import_trust`) or cannot be imported.
    """
    return OwnTask(name, level, named_function("task.name", "task", name, {}), params, seed)


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
