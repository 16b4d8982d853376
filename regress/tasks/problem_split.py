"""The split of a task into training and evaluation problems, and the order of training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from regress.errors import TaskError
from regress.tasks.conversation_turns import answer_text
from regress.tasks.portable_draws import distinct, generator
from regress.tasks.problem import Problem
from regress.tasks.task_registry import Task

TRAIN_SIZE = 512
"""Training problems drawn from a generator where no number is given."""


@dataclass(frozen=True)
class Dataset:
    """Training and evaluation problems. No prompt occurs twice, within a part or across both."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]

    def texts(self) -> list[str]:
        """Return every prompt, answer and right completion: the text that a local tokenizer is trained on."""
        problems = self.train + self.evaluation
        return [text for p in problems for text in (p.prompt, p.answer, *p.solution)]


def make_dataset(task: Task, train_size: int | None, eval_size: int) -> Dataset:
    """Draw distinct prompts and split them in two; both parts have the same mix of problems.

    Without a `train_size` it is all that a finite collection has besides `eval_size`, and `TRAIN_SIZE` of others.
    Raises TaskError if the task has fewer distinct prompts than train_size + eval_size.
    """
    return make_graded_dataset([task], train_size, eval_size)


def make_graded_dataset(tasks: Sequence[Task], train_size: int | None, eval_size: int) -> Dataset:
    """Draw from several tasks, such as the levels of one, in equal shares; see `make_dataset`.

    The parts of a dataset take turns, so that its first problems are of all tasks. A prompt that an earlier task has
    given is not taken from a later one.
    """
    if train_size is None:
        known = [task.size for task in tasks if task.size is not None]
        train_size = sum(known) - eval_size if known else TRAIN_SIZE
        if known and train_size < 1:
            raise TaskError(f"""task.dataset_path holds {sum(known)} problems, of which task.eval_size {eval_size}
            leaves none to train on; lower task.eval_size""")
    if train_size < 1 or eval_size < 0:
        raise TaskError(
            f"task.train_size {train_size} must be at least 1 and task.eval_size {eval_size} at least 0"
        )
    seen: set[str] = set()
    parts: list[tuple[list[Problem], list[Problem]]] = []
    shares = zip(_shares(train_size, len(tasks)), _shares(eval_size, len(tasks)), strict=True)
    for task, (train, evaluation) in zip(tasks, shares, strict=True):
        drawn = task.draw(train + evaluation + len(seen))
        new = [problem for problem in drawn if problem.prompt not in seen][: train + evaluation]
        _require_enough(task, len(new), train, evaluation)
        seen.update(problem.prompt for problem in new)
        parts.append((new[:train], new[train:]))
    train_parts, evaluation_parts = zip(*parts, strict=True)
    return Dataset(_in_turn(train_parts), _in_turn(evaluation_parts))


def _shares(count: int, parts: int) -> list[int]:
    return [(count + parts - 1 - index) // parts for index in range(parts)]


def _in_turn(parts: Sequence[Sequence[Problem]]) -> tuple[Problem, ...]:
    return tuple(found for turn in zip_longest(*parts) for found in turn if found is not None)


def _require_enough(task: Task, found: int, train_size: int, eval_size: int) -> None:
    if found >= train_size + eval_size:
        return
    needed = train_size + eval_size
    if task.size is not None:
        raise TaskError(f"""task.dataset_path holds {found} problems, but task.train_size {train_size} and
        task.eval_size {eval_size} need {needed}: lower one of them, or set task.train_size=null for all that is
        left""")
    raise TaskError(f"""task {task.name!r} at level {task.level} yields only {found} distinct prompts, but train_size
    {train_size} and eval_size {eval_size} need {needed}: lower task.train_size or task.eval_size, raise task.level, or
    widen task.params""")


def with_answer_tags(dataset: Dataset) -> Dataset:
    """Return the dataset with every answer that is given at once shown between answer marks."""

    def tagged(problems: Sequence[Problem]) -> tuple[Problem, ...]:
        return tuple(p if p.solution else replace(p, solution=(answer_text(p.answer),)) for p in problems)

    return Dataset(tagged(dataset.train), tagged(dataset.evaluation))


def training_batch(
    problems: Sequence[Problem], step: int, prompts_per_step: int, seed: object
) -> list[Problem]:
    """Return the problems of training step `step` (from 0).

    A pure function: a resumed or replayed run needs no sampler state. Each epoch visits the problems in its
    own order and ends when fewer than prompts_per_step are left, so no step holds a prompt twice. Raises
    TaskError if there are fewer problems than that. The text of `seed` decides the orders.
    """
    if not 1 <= prompts_per_step <= len(problems):
        raise TaskError(f"""data.prompts_per_step {prompts_per_step} must lie between 1 and the {len(problems)} training
        problems: lower it or raise task.train_size""")
    epoch, place = divmod(step, len(problems) // prompts_per_step)
    order = _epoch_order(len(problems), epoch, seed)
    return [problems[index] for index in order[place * prompts_per_step : (place + 1) * prompts_per_step]]


@lru_cache(maxsize=4)
def _epoch_order(size: int, epoch: int, seed: object) -> tuple[int, ...]:
    return tuple(distinct(generator("epoch", epoch, seed), size))
