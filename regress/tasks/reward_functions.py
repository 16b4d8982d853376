"""Rewards: named plain functions of (problem, completion text), and their weighted sum.

A reward with a parameter ``turns`` gets all turns of the conversation, of which the completion is the last. None of
them evaluates what the model wrote: completions are compared, calls and answers found by their marks.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from regress.errors import TaskError
from regress.tasks.conversation_turns import Turn, parse_answer, parse_call, takes_turns
from regress.tasks.named_functions import named_function
from regress.tasks.problem import WHITESPACE, Problem, is_correct

RewardFunction = Callable[..., float]

_REGISTRY: dict[str, RewardFunction] = {}


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a function for `task.rewards`. Raises TaskError if the name is taken."""

    def register(function: RewardFunction) -> RewardFunction:
        if name in _REGISTRY:
            raise TaskError(f"reward {name!r} is registered already: choose another name")
        _REGISTRY[name] = function
        return function

    return register


@register_reward("exact_match")
def exact_match(problem: Problem, completion: str) -> float:
    """Return 1 if the completion is the answer, else 0."""
    return float(is_correct(problem, completion))


@register_reward("contains_answer")
def contains_answer(problem: Problem, completion: str) -> float:
    """Return 1 if the completion is the answer, 0.5 if the answer is one of its whitespace-separated words, else 0.

    Only whole words count: otherwise "0123456789" would be rewarded for every number that it contains.
    """
    if is_correct(problem, completion):
        return 1.0
    return 0.5 if problem.answer in completion.split() else 0.0


@register_reward("character_match")
def character_match(problem: Problem, completion: str) -> float:
    """Return the share of positions, up to the longer text's end, with the right character: dense, 1 only
    if correct.
    """
    text = completion.strip(WHITESPACE)
    right = sum(a == b for a, b in zip(problem.answer, text, strict=False))
    return right / max(len(problem.answer), len(text))


_FORMATS = (re.compile(r"-?[0-9]+"), re.compile(r"[a-z]+"), re.compile(r"[A-Za-z]+"), re.compile(r"\S+"))


@register_reward("format")
def answer_format(problem: Problem, completion: str) -> float:
    """Return 1 if the completion has the form of the answer (integer, lower-case word, word, one token), else 0.

    For an answer of several words any non-empty text will do.
    """
    text = completion.strip(WHITESPACE)
    for pattern in _FORMATS:
        if pattern.fullmatch(problem.answer):
            return float(pattern.fullmatch(text) is not None)
    return float(bool(text))


@register_reward("answer_tag")
def answer_tag(problem: Problem, completion: str) -> float:
    """Return 1 for the right text between answer marks, 0.5 if it is one of the words there, 0.01 for marks alone, else
    0.
    """
    said = parse_answer(completion)
    if said is None:
        return 0.0
    if said == problem.answer:
        return 1.0
    return 0.5 if problem.answer in said.split() else 0.01


@register_reward("step1_format")
def step1_format(problem: Problem, completion: str, turns: Sequence[Turn]) -> float:
    """Return 0.2 if the first completion calls a tool, else -0.5."""
    return 0.2 if parse_call(turns[0].completion) is not None else -0.5


@register_reward("step1_exec")
def step1_exec(problem: Problem, completion: str, turns: Sequence[Turn]) -> float:
    """Return 0.5 if the call of the first completion got a result, -1 if it failed, 0 if there was none."""
    if parse_call(turns[0].completion) is None:
        return 0.0
    return 0.5 if turns[0].reply is not None else -1.0


@register_reward("step2_format")
def step2_format(problem: Problem, completion: str, turns: Sequence[Turn]) -> float:
    """Return 0.3 if the second completion is text between answer marks, -0.8 if not, 0 without a second one."""
    if len(turns) < 2:
        return 0.0
    return 0.3 if parse_answer(turns[1].completion) is not None else -0.8


@register_reward("step2_content")
def step2_content(problem: Problem, completion: str, turns: Sequence[Turn]) -> float:
    """Return 1 if the answer marks of the second completion hold the right answer, -0.5 if another, 0 without any."""
    said = parse_answer(turns[1].completion) if len(turns) > 1 else None
    if said is None:
        return 0.0
    return 1.0 if said == problem.answer else -0.5


@dataclass(frozen=True)
class Reward:
    """Reward of one completion: the weighted sum, and each function's own unweighted value.

    Functions that left the completion out are not among the parts; without any part the sum is 0.
    """

    total: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class RewardSum:
    """Weighted sum of reward functions, callable like one.

    Attributes:
        terms: name, weight and function of each.
        may_miss: True if a function may return None for a completion that it leaves out.
    """

    terms: tuple[tuple[str, float, RewardFunction], ...]
    may_miss: bool = False

    def __call__(self, problem: Problem, completion: str, turns: Sequence[Turn] = ()) -> Reward:
        """Return the reward of a conversation, of which the completion is the last one; without turns the only one.

        Raises TaskError if a function raises or returns anything but a finite number, or if the sum is not finite.
        """
        turns = tuple(turns) or (Turn(completion),)
        found = {
            name: _evaluate(name, function, problem, completion, turns, self.may_miss)
            for name, _, function in self.terms
        }
        parts = {name: value for name, value in found.items() if value is not None}
        total = sum(weight * parts[name] for name, weight, _ in self.terms if name in parts)
        if not math.isfinite(total):
            raise TaskError(f"""task.rewards: the weighted sum of {parts} on task {problem.task!r} (task_id
            {problem.task_id}) is {total!r}; lower the weights""")
        return Reward(total, parts)


def make_rewards(weights: Mapping[str, float], *, may_miss: bool = False) -> RewardSum:
    """Return the sum of the rewards named in `weights` (`task.rewards`: name -> weight).

    With ``may_miss`` a function may return None for a completion that it leaves out.
    A name is a registered one or a path "package.module:function". Raises TaskError for an unknown name, a
    path that cannot be imported, a weight that is not a finite number, and when no weight differs from 0.
    """
    for name, weight in weights.items():
        _check_weight(name, weight)
    if not any(weights.values()):
        raise TaskError(
            "task.rewards must give at least one reward a weight other than 0, for example {exact_match: 1.0}"
        )
    return RewardSum(
        tuple(
            (name, float(weight), named_function("task.rewards", "reward", name, _REGISTRY))
            for name, weight in weights.items()
        ),
        may_miss,
    )


def _check_weight(name: str, weight: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise TaskError(f"task.rewards.{name}: the weight must be a finite number, not {weight!r}")


def _evaluate(
    name: str,
    function: RewardFunction,
    problem: Problem,
    completion: str,
    turns: tuple[Turn, ...],
    may_miss: bool,
) -> float | None:
    where = f"reward {name!r} on task {problem.task!r} (task_id {problem.task_id})"
    try:
        value: object = function(problem, completion, **({"turns": turns} if takes_turns(function) else {}))
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"{where} raised {type(error).__name__}: {error}; a reward must return a number for every text"
        ) from error
    if value is None and may_miss:
        return None
    if not isinstance(value, Real):
        more = ", or None under algorithm.missing_rewards=exclude" if value is None else ""
        raise TaskError(f"{where} returned {value!r}; a reward must return a number{more}")
    try:
        result = float(value)
    except OverflowError:  # an int beyond the largest float
        result = math.inf
    if not math.isfinite(result):
        raise TaskError(f"{where} returned {result!r}; a reward must be finite")
    return result
