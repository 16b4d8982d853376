"""Calls and answers in completions, the tools' environments, and the rewards of a whole conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.tasks.calculator import ToolError
from regress.tasks.conversation_turns import Call, Turn, answer_text, call_text, parse_answer, parse_call
from regress.tasks.dialogue_environments import Environment, make_environment
from regress.tasks.knowledge_base import ALPHABET, RELATIONS, knowledge_base, search
from regress.tasks.problem import Problem, is_correct
from regress.tasks.reward_functions import make_rewards
from regress.tasks.task_registry import make_task

STEPS = ("step1_format", "step1_exec", "step2_format", "step2_content")
PROBLEM = Problem("calculate", "3*4", "12")


@pytest.mark.parametrize(
    ("completion", "call"),
    [
        ("<tool:calculator>3*4</tool:calculator>", Call("calculator", "3*4")),
        ("I need it: <tool:calc> 3*4 </tool> now", Call("calc", "3*4")),
        ("<tool:calculator></tool:calculator>", Call("calculator", "")),
        ("<tool:calculator>3*4</tool:search>", None),
        ("<tool:calculator>3*4", None),
        ("3*4</tool:calculator>", None),
        ("<tool:calc>1</tool><tool:calc>2</tool>", None),
        ("<tool:calc>1<tool:calc>2</tool>", None),
        ("<answer>12</answer>", None),
    ],
)
def test_calls_are_found_by_their_marks(completion: str, call: Call | None) -> None:
    assert parse_call(completion) == call


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" <answer> 12 </answer>\n", "12"),
        ("<answer></answer>", ""),
        ("so <answer>12</answer>", None),
        ("<answer>12</answer><answer>12</answer>", None),
        ("<answer>12", None),
        ("12", None),
    ],
)
def test_answers_stand_alone_between_their_marks(completion: str, answer: str | None) -> None:
    assert parse_answer(completion) == answer


@settings(deadline=None)
@given(st.text("ab1 ", min_size=1).map(str.strip).filter(bool))
def test_marks_are_written_as_they_are_read(text: str) -> None:
    assert parse_call(call_text("search", text)) == Call("search", text)
    assert parse_answer(answer_text(text)) == text
    assert is_correct(Problem("copy", "copy", text), answer_text(text))


@pytest.mark.parametrize("name", ["calculate", "lookup"])
@settings(max_examples=12, deadline=None)
@given(level=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_tool_knows_the_answer_to_every_problem(name: str, level: int, seed: int) -> None:
    environment = make_environment({"calculate": "calculator", "lookup": "search"}[name])
    rewards = make_rewards(dict.fromkeys(STEPS, 1.0))
    for problem in make_task(name, level, seed=seed).draw(4):
        call, answer = problem.solution
        reply = environment(problem, call)
        assert reply is not None
        assert reply.endswith(problem.answer)
        assert set(reply) <= set(environment.alphabet)
        assert is_correct(problem, answer)
        assert rewards(problem, answer, (Turn(call, reply), Turn(answer))).total == pytest.approx(2.0)


def test_one_vocabulary_serves_all_levels_of_a_tool() -> None:
    """Otherwise a model could not go on from one level to the next."""
    for name, alphabet in (("calculate", set("0123456789+-*()")), ("lookup", set(ALPHABET) - {":"})):
        for level in (1, 3, 5):
            texts = "".join(problem.prompt for problem in make_task(name, level).draw(100))
            assert set(texts) <= alphabet


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["<tool:calc>3*4</tool>", "12", "<answer>12</answer>", None], (0.2, 0.5, 0.3, 1.0)),
        (["<tool:calc>3*4</tool>", "12", "<answer>13</answer>", None], (0.2, 0.5, 0.3, -0.5)),
        (["<tool:calc>3*4</tool>", "12", "12", None], (0.2, 0.5, -0.8, 0.0)),
        (["<tool:calc>3*</tool>", None], (0.2, -1.0, 0.0, 0.0)),
        (["12", None], (-0.5, 0.0, 0.0, 0.0)),
        (["<answer>12</answer>", None], (-0.5, 0.0, 0.0, 0.0)),
        (["<tool:calc>3*4</tool>", "12"], (0.2, 0.5, 0.0, 0.0)),  # no room for the second turn
    ],
)
def test_the_rewards_of_two_steps(turns: list[str | None], expected: tuple[float, ...]) -> None:
    talk = tuple(Turn(str(said), reply) for said, reply in zip(turns[::2], turns[1::2], strict=True))
    found = make_rewards(dict.fromkeys(STEPS, 1.0))(PROBLEM, talk[-1].completion, talk)
    assert tuple(found.parts[name] for name in STEPS) == expected
    assert found.total == pytest.approx(sum(expected))


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>12</answer>", 1.0),
        ("<answer>it is 12 I think</answer>", 0.5),
        ("<answer>0123456789</answer>", 0.01),
        ("12", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_an_answer_given_at_once(completion: str, value: float) -> None:
    assert make_rewards({"answer_tag": 1.0})(PROBLEM, completion).total == value


@pytest.mark.parametrize(
    "completion", ["", "12", "<tool:search>3*4</tool>", "<tool:calc>1/0</tool>", "<tool:calc>open()</tool>"]
)
def test_a_conversation_without_a_result_ends(completion: str) -> None:
    assert make_environment("calculator")(PROBLEM, completion) is None


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=300) | st.sampled_from(["", "city", "of", "x" * 201]))
def test_search_finds_a_document_or_says_that_there_is_none(text: str) -> None:
    words = {
        word for document in knowledge_base().documents for word in document.replace(":", "").split()
    } - {"of"}
    if len(text) > 200 or not words & set(re.findall("[a-z]+", text.lower())):
        with pytest.raises(ToolError, match="query"):
            search(text)
    else:
        assert search(text) in knowledge_base().documents


def test_search_finds_every_fact_by_its_question() -> None:
    base = knowledge_base()
    for (relation, subject), value in list(base.facts.items())[::97]:
        assert search(f"{relation} of {subject}") == f"{relation} of {subject}: {value}"
        assert search(f"what is {subject}'s {relation.upper()}?") == f"{relation} of {subject}: {value}"
    assert {document.split()[0] for document in base.documents} == set(RELATIONS)


def test_functions_of_ones_own_see_the_turns_if_they_ask_for_them() -> None:
    def feedback(problem: Problem, completion: str, turns: Sequence[Turn]) -> str | None:
        return f"{len(turns)} before {completion}"

    def reward(problem: Problem, completion: str, turns: Sequence[Turn]) -> float:
        return float(len(turns))

    earlier = (Turn("a", "b"),)
    assert Environment("mine", feedback)(PROBLEM, "c", earlier) == "1 before c"
    rewards = make_rewards({"exact_match": 1.0})
    seen = type(rewards)((("mine", 1.0, reward),))
    assert seen(PROBLEM, "c", (*earlier, Turn("c"))).total == 2.0
    assert seen(PROBLEM, "c").total == 1.0, "a single completion is a conversation of one turn"
