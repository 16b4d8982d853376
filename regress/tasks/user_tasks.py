"""Tasks that are the user's own functions: ``task.name=package.module:function``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regress.errors import TaskError, reason
from regress.tasks.data_rows import RowFields, problem_of
from regress.tasks.named_functions import named_function
from regress.tasks.problem import Problem

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
