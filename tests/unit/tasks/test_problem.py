"""The verifier: exactly the right answer, and text is never more than text."""

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.problem import Problem, is_correct
from regress.tasks.reward_functions import make_rewards
from regress.tasks.task_registry import make_task, task_names

SPACE = st.text(" \t\r\n", max_size=3)
PROBLEMS = [problem for name in task_names() for problem in make_task(name, 1).draw(5)]
WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)


@settings(deadline=None)
@given(problem=st.sampled_from(PROBLEMS), before=SPACE, after=SPACE)
def test_the_answer_is_right_whatever_space_surrounds_it(problem: Problem, before: str, after: str) -> None:
    assert is_correct(problem, before + problem.answer + after)


@settings(deadline=None)
@given(answer=WORD, completion=st.one_of(WORD, st.text(max_size=12)))
def test_nothing_else_is_right(answer: str, completion: str) -> None:
    problem = Problem("t", "p", answer)

    assert is_correct(problem, completion) == (completion.strip(" \t\r\n") == answer)


@settings(deadline=None)
@given(answer=WORD, place=st.integers(0, 8), letter=st.sampled_from("abz019 -+.\u00a0\u200b"))
def test_one_more_character_is_wrong(answer: str, place: int, letter: str) -> None:
    completion = answer[:place] + letter + answer[place:]

    assert is_correct(Problem("t", "p", answer), completion) == (completion.strip(" ") == answer)


@pytest.mark.parametrize(
    "completion",
    [
        "012",
        "+12",
        "12.0",
        "1_2",
        "0xc",
        "\uff11\uff12",
        "\u0661\u0662",
        "12\x00",
        "\u00a012",
        "12\u2003",
        "6+6",
        "12 12",
        "",
        "9" * 10_000,
    ],
)
def test_a_number_written_otherwise_is_wrong(completion: str) -> None:
    problem = Problem("chain_sum", "6+6", "12")

    assert is_correct(problem, "12")
    assert not is_correct(problem, completion)


HOSTILE = [
    "__import__('os').system('touch {0}')",
    "__import__('pathlib').Path('{0}').touch()",
    "[c for c in ().__class__.__base__.__subclasses__()] or open('{0}', 'w')",
    "$(touch {0})",
    "!!python/object/apply:os.system ['touch {0}']",
    "cos\nsystem\n(S'touch {0}'\ntR.",
    "(" * 5000,
    "9**9**9**9",
    "a" * 100_000,
    "\ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_worth_nothing_and_is_never_run(text: str, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    rewards = make_rewards({"exact_match": 1, "contains_answer": 1, "character_match": 0, "format": 0})

    totals = [rewards(problem, text.replace("{0}", str(target))).total for problem in PROBLEMS]

    assert not target.exists()
    assert totals == [0.0] * len(PROBLEMS)


def test_equal_content_has_an_equal_id_and_nothing_else_has() -> None:
    problem = Problem("gcd", "gcd 12 18", "6", level=1)

    assert problem.task_id == "26dfe9e9870053b0"
    assert Problem("gcd", "gcd 12 18", "6", level=3).task_id == problem.task_id
    others = [
        Problem("gc", "dgcd 12 18", "6"),
        Problem("gcd", "gcd 12 1", "86"),
        Problem("gcd", "gcd 9 6", "3"),
    ]
    assert len({problem.task_id} | {other.task_id for other in others}) == 4


@pytest.mark.parametrize("answer", ["", " ", " 6", "6\n"])
def test_an_answer_that_no_completion_can_equal_is_refused(answer: str) -> None:
    with pytest.raises(TaskError, match="is empty or has outer whitespace, so no completion could"):
        Problem("mine", "gcd 12 18", answer)
