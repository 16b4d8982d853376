"""Environments: what they say, and what they may not do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.dialogue_environments import Environment, checker, make_environment
from regress.tasks.problem import Problem, is_correct

words = st.text("abc?", min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def allowed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests name code that no project lists."""
    monkeypatch.setenv("GRPO_REGRESS_ALLOW_CODE", "1")


@settings(deadline=None)
@given(words, st.text("abc? <", max_size=8))
def test_the_checker_shows_what_is_right_and_nothing_else(answer: str, completion: str) -> None:
    problem = Problem("copy", "copy it", answer)
    said = checker(problem, completion)
    if is_correct(problem, completion):
        assert said is None
        return
    assert said is not None
    assert len(said) == len(answer)
    text = completion.strip()
    for place, character in enumerate(said):
        right = place < len(text) and text[place] == answer[place]
        assert character == (answer[place] if right else "?")


def test_the_checker_by_example() -> None:
    problem = Problem("rev", "rev abcd", "dcba")
    assert [checker(problem, text) for text in ("dcx", "", " dcba\n", "dcbaa")] == [
        "dc??",
        "????",
        None,
        "dcba",
    ]


def own(problem: Problem, completion: str) -> str | None:
    return completion.upper() or None


def test_an_environment_of_ones_own_is_named_by_its_path() -> None:
    problem = Problem("copy", "copy a", "a")
    found = make_environment(f"{__name__}:own")
    assert found(problem, "b") == "B"
    assert found(problem, "") is None


def test_unknown_environments_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        TaskError, match=r"task\.environment: there is no environment 'cheker'; did you mean 'checker'"
    ):
        make_environment("cheker")
    with pytest.raises(
        TaskError, match=r"task\.environment: cannot import 'no_such:thing' \(ModuleNotFoundError"
    ):
        make_environment("no_such:thing")


def test_an_environment_that_fails_is_named_with_its_problem() -> None:
    problem = Problem("copy", "copy a", "a")

    def broken(problem: Problem, completion: str) -> str | None:
        raise KeyError(completion)

    def number(problem: Problem, completion: str) -> str | None:
        return 3  # type: ignore[return-value]  # what a careless author might write

    where = rf"environment 'mine' on task 'copy' \(task_id {problem.task_id}\)"
    with pytest.raises(
        TaskError, match=rf"{where} raised KeyError: 'b'; an environment must answer every text"
    ):
        Environment("mine", broken)(problem, "b")
    with pytest.raises(TaskError, match=rf"{where} returned 3; an environment must return text or None"):
        Environment("mine", number)(problem, "b")


def test_an_environment_that_the_project_does_not_allow_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A golden case or configuration of somebody else must not run code."""
    monkeypatch.delenv("GRPO_REGRESS_ALLOW_CODE")
    with pytest.raises(
        TaskError, match=r"task\.environment: 'os:system' names code of the module os, which is imp"
    ):
        make_environment("os:system")
