"""The split of a task into training and evaluation problems, and the order of training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from regress.errors import TaskError
from regress.tasks.conversation import answer_text
from regress.tasks.draws import distinct, generator
from regress.tasks.problem import Problem
from regress.tasks.registry import Task


@dataclass(frozen=True)
class Dataset:
    """Training and evaluation problems. No prompt occurs twice, within a part or across both."""

    train: tuple[Problem, ...]
    evaluation: tuple[Problem, ...]

    def texts(self) -> list[str]:
        """Return every prompt, answer and right completion: the text that a local tokenizer is trained on."""
        problems = self.train + self.evaluation
        return [text for p in problems for text in (p.prompt, p.answer, *p.solution)]


def make_dataset(task: Task, train_size: int, eval_size: int) -> Dataset:
    """Draw distinct prompts and split them in two; both parts have the same mix of problems.

    Raises TaskError if the task has fewer distinct prompts than train_size + eval_size.
    """
    if train_size < 1 or eval_size < 0:
        raise TaskError(
            f"task.train_size {train_size} must be at least 1 and task.eval_size {eval_size} at least 0"
        )
    needed = train_size + eval_size
    problems = task.draw(needed)
    if len(problems) < needed:
        raise TaskError(
            f"task {task.name!r} at level {task.level} yields only {len(problems)} distinct prompts, but "
            f"train_size {train_size} and eval_size {eval_size} need {needed}: lower task.train_size or "
            "task.eval_size, raise task.level, or widen task.params"
        )
    return Dataset(tuple(problems[:train_size]), tuple(problems[train_size:]))


def with_answer_tags(dataset: Dataset) -> Dataset:
    """Return the dataset with every answer that is given at once shown between answer marks."""

    def tagged(problems: Sequence[Problem]) -> tuple[Problem, ...]:
        return tuple(p if p.solution else replace(p, solution=(answer_text(p.answer),)) for p in problems)

    return Dataset(tagged(dataset.train), tagged(dataset.evaluation))


def training_batch(problems: Sequence[Problem], step: int, prompts_per_step: int, seed: int) -> list[Problem]:
    """Return the problems of training step `step` (from 0).

    A pure function: a resumed or replayed run needs no sampler state. Each epoch visits the problems in its
    own order and ends when fewer than prompts_per_step are left, so no step holds a prompt twice. Raises
    TaskError if there are fewer problems than that.
    """
    if not 1 <= prompts_per_step <= len(problems):
        raise TaskError(
            f"data.prompts_per_step {prompts_per_step} must lie between 1 and the {len(problems)} training "
            "problems: lower it or raise task.train_size"
        )
    epoch, place = divmod(step, len(problems) // prompts_per_step)
    order = _epoch_order(len(problems), epoch, seed)
    return [problems[index] for index in order[place * prompts_per_step : (place + 1) * prompts_per_step]]


@lru_cache(maxsize=4)
def _epoch_order(size: int, epoch: int, seed: int) -> tuple[int, ...]:
    return tuple(distinct(generator("epoch", epoch, seed), size))
