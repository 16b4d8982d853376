"""Levels by name, and a complexity that belongs to the problem."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.difficulty_vocabulary import (
    HIGHEST,
    LEVELS,
    complexity_number,
    level_name,
    level_number,
    on_scale,
)
from regress.tasks.task_registry import make_task, task_names


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(task_names()), seed=st.integers(0, 99))
def test_complexity_belongs_to_the_problem_and_grows_with_the_levels(name: str, seed: int) -> None:
    """A complexity made from the level alone would differ for a prompt that two levels share."""
    known: dict[str, float] = {}
    means = []
    for level in range(1, 6):
        problems = make_task(name, level, seed=seed).draw(150)
        values = [problem.complexity for problem in problems]
        most = 8 if (name, level) == ("lookup", 3) else 2 * level  # its levels 3 and 4 end with the same size
        assert all(value is not None and 0 <= value <= most for value in values)
        for problem in problems:
            assert known.setdefault(problem.prompt, problem.complexity) == problem.complexity
        means.append(sum(value or 0.0 for value in values) / len(values))
    assert means == sorted(means)
    assert means[0] < 2.0 < means[2] < means[4]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True).map(sorted),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_the_scale_is_monotonic_from_0_to_10(bounds: list[int], first: int, second: int) -> None:
    low, high = sorted((first, second))
    assert 0 <= on_scale(low, bounds) <= on_scale(high, bounds) <= HIGHEST
    assert on_scale(bounds[0], bounds) == 0
    assert on_scale(bounds[-1], bounds) == HIGHEST


def test_a_level_is_a_name_or_a_number() -> None:
    for index, name in enumerate(LEVELS, 1):
        assert (
            level_number(f" {name.title()} ", "x")
            == level_number(str(index), "x")
            == level_number(index, "x")
        )
        assert level_name(index) == name
    assert level_name(7) == "level_7"


@pytest.mark.parametrize("level", ["hard", "", 0, -1, True, 1.5, None, "\u0661"])
def test_anything_else_is_no_level(level: object) -> None:
    with pytest.raises(
        TaskError, match=r"^here: .* is not a level; give one of basic, intermediate, advanced,"
    ):
        level_number(level, "here")


@pytest.mark.parametrize("value", [-0.1, 10.1, float("nan"), True, "3"])
def test_no_complexity(value: object) -> None:
    with pytest.raises(TaskError, match=r"^here: .* is not a complexity; give a number from 0 to 10$"):
        complexity_number(value, "here")
