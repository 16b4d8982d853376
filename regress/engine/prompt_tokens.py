"""Prompt tokens of problems: the groups of a step, the evaluation set, and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.dialogue_rollouts import Dialogue
from regress.engine.rollout_worker import Prompt
from regress.engine.tokenizer import completion_ids, completion_text, prompt_ids
from regress.errors import ConfigError, reason
from regress.tasks.curriculum import CurriculumPosition
from regress.tasks.portable_draws import distinct, generator
from regress.tasks.problem import Problem, is_correct
from regress.tasks.problem_split import Dataset, training_batch


class Prompts(Protocol):
    """Prompts of a run."""

    def train(self, step: int) -> list[Prompt]:
        """Return the groups of a training step."""

    def further(self, step: int, batch: int) -> list[Prompt]:
        """Return as many groups of other problems, for a training step of which ``batch`` batches are sampled."""

    def evaluation(self) -> list[Prompt]:
        """Return one greedy run of every held-out problem that is evaluated."""

    def demonstrations(self, step: int) -> list[Trajectory]:
        """Return prompts with their right answers, for a supervised step."""

    def place(self, step: int) -> CurriculumPosition | None:
        """Return the stage of the curriculum that a step's prompts are from; None without a curriculum."""

    def follow(self, place: Callable[[int], CurriculumPosition]) -> None:
        """Take the stage of every step from elsewhere, such as a recording."""

    @property
    def training_problems(self) -> int | None:
        """Number of problems to train on; None if nobody knows."""


class NoPrompts:
    """Prompts of a run without a task: none, because the recording that it replays holds them."""

    training_problems = None

    def train(self, step: int) -> list[Prompt]:
        """Return nothing: the worker serves all that was recorded of a step."""
        return []

    def further(self, step: int, batch: int) -> list[Prompt]:
        """Return nothing."""
        return []

    def evaluation(self) -> list[Prompt]:
        """Return nothing."""
        return []

    def demonstrations(self, step: int) -> list[Trajectory]:
        """Return nothing; the configuration refuses a warm start."""
        return []

    def place(self, step: int) -> CurriculumPosition | None:
        """Return None: there is no curriculum."""
        return None

    def follow(self, place: Callable[[int], CurriculumPosition]) -> None:
        """Do nothing: there is no curriculum."""


class PromptSource:
    """Prompts as pure functions of the step and of its stage, so that resume and replay need no hidden state.

    Raises:
        ConfigError: if a prompt is longer than ``data.max_prompt_length`` tokens, or if the tokenizer cannot write
            the prompts or the answers.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._config = config
        self._dialogue = dialogue
        self._stages: Sequence[Sequence[Problem]] = ()
        self._place: Callable[[int], CurriculumPosition] | None = None
        self._tokens = {p.task_id: _prompt_tokens(tokenizer, p) for p in _all(dataset)}
        _check_distinct(self._tokens, _all(dataset))
        for problem in _all(dataset):
            _check_answer(tokenizer, problem)
        self._check_answers_fit(config.data.max_completion_length)
        longest = max(self._tokens, key=lambda task_id: len(self._tokens[task_id]))
        length, limit = len(self._tokens[longest]), config.data.max_prompt_length
        if length > limit:
            raise ConfigError(f"""data.max_prompt_length={limit}: the prompt of problem {longest} takes {length} tokens;
            set data.max_prompt_length to at least {length} or make the task easier""")

    def set_stages(
        self, stages: Sequence[Sequence[Problem]], place: Callable[[int], CurriculumPosition]
    ) -> None:
        """Sample the problems of one stage at a time.

        Args:
            stages: training problems of each stage.
            place: the stage of a step.
        """
        self._stages = stages
        self._place = place

    def follow(self, place: Callable[[int], CurriculumPosition]) -> None:
        """Take the stage of every step from elsewhere, such as a recording."""
        self._place = place

    def place(self, step: int) -> CurriculumPosition | None:
        """Return the stage of the curriculum that a step's prompts are from; None without a curriculum."""
        return None if self._place is None or not self._stages else self._place(step)

    @property
    def training_problems(self) -> int | None:
        """Number of problems to train on."""
        return len(self._dataset.train)

    def train(self, step: int) -> list[Prompt]:
        """Return the groups of a training step; a stage is gone through from its first step on."""
        return self._groups(step, 0, self._problems(step))

    def further(self, step: int, batch: int) -> list[Prompt]:
        """Return as many groups of other problems, for a training step of which ``batch`` batches are sampled.

        The problems that the step did not begin with follow each other in an order of its own, again and again.
        """
        first, (source, seed) = self._problems(step), self._source(step)
        began = {problem.task_id for problem in first}
        others = [problem for problem in source if problem.task_id not in began] or list(first)
        order = list(distinct(generator("further", step, seed), len(others)))
        start = (batch - 1) * len(first)
        places = [order[place % len(others)] for place in range(start, start + len(first))]
        return self._groups(step, batch, [others[place] for place in places])

    def _source(self, step: int) -> tuple[Sequence[Problem], object]:
        """Return the problems that a step draws from, and the seed of their order."""
        place, seed = self.place(step), self._config.seed
        if place is None:
            return self._dataset.train, seed
        return self._stages[place.stage], f"{seed}/{place.round}/{place.stage}"

    def _problems(self, step: int) -> Sequence[Problem]:
        """Return the problems that a step begins with."""
        place, (source, seed) = self.place(step), self._source(step)
        since = 0 if place is None else place.start_step
        return training_batch(source, step - since, self._config.data.prompts_per_step, seed)

    def _groups(self, step: int, batch: int, problems: Sequence[Problem]) -> list[Prompt]:
        first = batch * len(problems)
        return [
            self._prompt(f"{step:06d}-{first + index:04d}", problem, self._config.data.group_size)
            for index, problem in enumerate(problems)
        ]

    def evaluation(self) -> list[Prompt]:
        """Return one greedy run of every held-out problem that is evaluated."""
        problems = self._dataset.evaluation[: self._config.evaluation.max_samples]
        return [self._prompt(f"eval-{index:04d}", problem, 1) for index, problem in enumerate(problems)]

    def demonstrations(self, step: int) -> list[Trajectory]:
        """Return prompts with their right answers, for a supervised step.

        A solution of several completions is shown whole. Otherwise, with several turns, every other answer is given at
        the second attempt; the first one is not in the loss mask.
        """
        size = min(self._config.warm_start.batch_size, len(self._dataset.train))
        problems = training_batch(self._dataset.train, step, size, self._config.seed)
        return [self._demonstration(index, problem) for index, problem in enumerate(problems)]

    def _prompt(self, group_id: str, problem: Problem, group_size: int) -> Prompt:
        return Prompt(group_id, problem, self._tokens[problem.task_id], group_size)

    def _demonstration(self, index: int, problem: Problem) -> Trajectory:
        prompt = list(self._tokens[problem.task_id])
        after, mask = self._right(problem)
        if len(problem.completions) == 1 and self._dialogue is not None and index % 2:
            first = self._dialogue.correction(problem)
            if len(first) + len(after) <= self._config.data.max_completion_length:
                after, mask = first + after, [0] * len(first) + mask
        return Trajectory(
            group_id=f"demonstration-{index:04d}",
            run_id=0,
            tokens=prompt + after,
            loss_mask=[0] * len(prompt) + mask,
            reward=0.0,
            prompt_length=len(prompt),
        )

    def _right(self, problem: Problem) -> tuple[list[int], list[int]]:
        """Return everything after the prompt in a right conversation, and its loss mask."""
        if len(problem.completions) > 1 and self._dialogue is not None:
            return self._dialogue.solution(problem)
        tokens = completion_ids(self._tokenizer, problem.completions[-1])
        return tokens, [1] * len(tokens)

    def _check_answers_fit(self, limit: int) -> None:
        """Refuse a limit that every answer exceeds: no completion could ever be right."""
        lengths = [len(self._right(problem)[0]) for problem in _all(self._dataset)]
        if min(lengths) > limit:
            raise ConfigError(f"""data.max_completion_length={limit}: every answer of the task takes more tokens, from
            {min(lengths)} to {max(lengths)} with its end; set data.max_completion_length={max(lengths)}""")


def _prompt_tokens(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[int, ...]:
    if problem.tokens is not None:
        if max(problem.tokens) >= len(tokenizer):
            raise ConfigError(f"""task.dataset_path: a prompt holds the token id {max(problem.tokens)}, and the
            tokenizer knows {len(tokenizer)} tokens; give the tokenizer that made them as tokenizer.path""")
        return problem.tokens
    try:
        tokens = tuple(prompt_ids(tokenizer, problem.prompt))
    except Exception as error:  # a chat template is a program and may raise anything
        raise ConfigError(f"""tokenizer.path: the chat template cannot write the prompt {problem.prompt!r}
        ({reason(error)}); correct chat_template""") from error
    if not tokens:
        raise ConfigError(
            f"tokenizer.path: the chat template writes nothing for the prompt {problem.prompt!r}; correct chat_template"
        )
    return tokens


def _check_distinct(tokens: Mapping[str, tuple[int, ...]], problems: Sequence[Problem]) -> None:
    """Refuse prompts that a template or vocabulary makes equal: the model could only guess."""
    seen: dict[tuple[int, ...], Problem] = {}
    for problem in problems:
        earlier = seen.setdefault(tokens[problem.task_id], problem)
        if earlier is not problem and earlier.prompt == problem.prompt:
            raise ConfigError(f"""the prompt {problem.prompt!r} is there twice, so that it could be trained on and
            evaluated with; take it out of task.eval_path or task.dataset_path, or let the task make other prompts""")
        if earlier is not problem:
            raise ConfigError(f"""tokenizer.path: the prompts {earlier.prompt!r} and {problem.prompt!r} become the same
            tokens; correct chat_template, or give a tokenizer that knows their characters""")


def _check_answer(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> None:
    """Refuse a tokenizer without the task's characters: every completion would be wrong."""
    answer = problem.completions[-1]
    written = completion_text(tokenizer, completion_ids(tokenizer, answer))
    if not is_correct(problem, written):
        raise ConfigError(f"""tokenizer.path: the tokenizer turns the answer {answer!r} into {written!r}, so no
        completion could be right; give a tokenizer that knows the characters of task {problem.task}""")


def _all(dataset: Dataset) -> Sequence[Problem]:
    return [*dataset.train, *dataset.evaluation]
