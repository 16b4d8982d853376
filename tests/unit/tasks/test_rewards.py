"""Rewards: their values, their sum, and what a bad one is told."""

import math
import re
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks import reward_functions
from regress.tasks.problem import Problem
from regress.tasks.reward_functions import (
    answer_format,
    character_match,
    contains_answer,
    exact_match,
    make_rewards,
    register_reward,
)

NUMBER = Problem("chain_sum", "6+6", "12")
WORD = Problem("reverse_string", "rev cba", "abc")


@pytest.fixture(autouse=True)
def allowed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests name code that no project lists."""
    monkeypatch.setenv("GRPO_REGRESS_ALLOW_CODE", "1")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("12", 1.0), (" 12\n", 1.0), ("it is 12", 0.5), ("12 13", 0.5), ("0123", 0.0), ("12.", 0.0), ("", 0.0)],
)
def test_contains_answer_looks_for_whole_words(completion: str, expected: float) -> None:
    assert contains_answer(NUMBER, completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("abc", 1.0),
        ("abd", 2 / 3),
        ("abcc", 3 / 4),
        ("ab", 2 / 3),
        ("bca", 0.0),
        ("", 0.0),
        ("a" * 30, 1 / 30),
    ],
)
def test_character_match_counts_right_places(completion: str, expected: float) -> None:
    assert character_match(WORD, completion) == expected


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        ("-4", ["12", "-0"], ["+4", "4.0", "four", "", "-", "\uff14"]),
        ("abc", ["z"], ["Z", "a1", "a b", ""]),
        ("Yes", ["no", "NO"], ["n0", ""]),
        ("x=1", ["anything"], ["two words", ""]),
        ("two words", ["one", "three more words"], ["", " \n"]),
    ],
)
def test_format_is_that_of_the_answer(answer: str, good: list[str], bad: list[str]) -> None:
    problem = Problem("t", "p", answer)

    assert [answer_format(problem, text) for text in good] == [1.0] * len(good)
    assert [answer_format(problem, text) for text in bad] == [0.0] * len(bad)


@settings(deadline=None)
@given(text=st.text())
def test_every_reward_lies_between_0_and_1_and_only_the_answer_gets_full_marks(text: str) -> None:
    for problem in (NUMBER, WORD):
        assert answer_format(problem, text) in (0.0, 1.0)
        for function in (exact_match, contains_answer, character_match):
            value = function(problem, text)
            assert 0.0 <= value <= 1.0
            assert (value == 1.0) == (text.strip(" \t\r\n") == problem.answer)


@settings(deadline=None)
@given(weights=st.tuples(*[st.floats(-10, 10)] * 3).filter(any))
def test_the_total_is_the_weighted_sum_and_the_parts_are_kept_unweighted(weights: tuple[float, ...]) -> None:
    names = ("exact_match", "character_match", "format")

    reward = make_rewards(dict(zip(names, weights, strict=True)))(WORD, "abd")

    assert reward.parts == {"exact_match": 0.0, "character_match": 2 / 3, "format": 1.0}
    assert reward.total == pytest.approx(weights[1] * 2 / 3 + weights[2])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", made)
    return made


def test_own_rewards_are_found_by_path_and_by_registered_name(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_functions, "_REGISTRY", dict(reward_functions._REGISTRY))
    module.short = lambda problem, completion: 1 / (1 + len(completion))

    @register_reward("length")
    def length(problem: Problem, completion: str) -> float:
        return len(completion)

    assert make_rewards({"mine:short": 3.0, "length": 2})(WORD, "ab").total == 3.0 / 3 + 2 * 2
    with pytest.raises(TaskError, match="reward 'length' is registered already: choose another name"):
        register_reward("length")(length)


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1)])
def test_any_real_number_counts_as_a_float(module: types.ModuleType, value: float) -> None:
    module.f = lambda problem, completion: value

    reward = make_rewards({"mine:f": 0.5})(WORD, "")

    assert reward.total == 0.5
    assert all(type(part) is float for part in reward.parts.values())


def raising(error: BaseException) -> Callable[[Problem, str], float]:
    def function(problem: Problem, completion: str) -> float:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, c: math.nan, "returned nan; a reward must be finite"),
        (lambda p, c: -math.inf, "returned -inf; a reward must be finite"),
        (lambda p, c: np.float32("nan"), "a reward must be finite"),
        (lambda p, c: None, "returned None; a reward must return a number"),
        (lambda p, c: "1", "returned '1'; a reward must return a number"),
        (lambda p, c: [1.0], "returned [1.0]; a reward must return a number"),
        (lambda p, c: 1j, "returned 1j; a reward must return a number"),
        (lambda p, c: 10**400, "returned inf; a reward must be finite"),
        (
            raising(ValueError("no good")),
            "raised ValueError: no good; a reward must return a number for every text",
        ),
        (raising(RecursionError("deep")), "raised RecursionError: deep"),
        (lambda p: 1.0, "raised TypeError"),
    ],
)
def test_a_bad_reward_is_named_with_its_task(
    module: types.ModuleType, function: Callable[..., float], message: str
) -> None:
    module.f = function

    with pytest.raises(TaskError, match=re.escape(message)) as caught:
        make_rewards({"exact_match": 1.0, "mine:f": 0.0})(WORD, "abc")

    assert str(caught.value).startswith(f"reward 'mine:f' on task 'reverse_string' (task_id {WORD.task_id})")


def test_an_interrupt_is_not_a_bad_reward(module: types.ModuleType) -> None:
    module.f = raising(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        make_rewards({"mine:f": 1.0})(WORD, "abc")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "task.rewards must give at least one reward a weight other than 0"),
        ({"exact_match": 0.0}, "task.rewards must give at least one reward a weight other than 0"),
        ({"exact_match": math.nan}, "task.rewards.exact_match: the weight must be a finite number, not nan"),
        ({"exact_match": "1"}, "task.rewards.exact_match: the weight must be a finite number, not '1'"),
        ({"exact_match": True}, "task.rewards.exact_match: the weight must be a finite number, not True"),
        ({"exact": 1.0}, "task.rewards: there is no reward 'exact'; did you mean 'exact_match'?"),
        (
            {"no.such.module:f": 1.0},
            "cannot import 'no.such.module:f' (ModuleNotFoundError: No module named 'no')",
        ),
        (
            {"math:nope": 1.0},
            "cannot import 'math:nope' (AttributeError: module 'math' has no attribute 'nope')",
        ),
        ({":f": 1.0}, "cannot import ':f' (ValueError: Empty module name)"),
        ({"math:pi": 1.0}, "task.rewards: 'math:pi' is not a function but 3.14159"),
    ],
)
def test_impossible_rewards_are_refused_with_the_remedy(weights: dict[str, float], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        make_rewards(weights)
