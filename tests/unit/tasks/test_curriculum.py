"""Curriculum: only evaluations end a stage, each is counted once, and the state survives."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.curriculum import Curriculum, CurriculumPosition, Rules
from regress.tasks.curriculum_stages import DEFAULT_STAGES, Stage, problems_of, read_stages
from regress.tasks.problem import Problem
from regress.tasks.task_registry import make_task, task_names


def stages(count: int = 3, threshold: float = 0.5, **others: Any) -> tuple[Stage, ...]:
    given = [{"name": f"s{index}", "threshold": threshold, **others} for index in range(count)]
    return read_stages(given, {}, min_evaluations=2, full_pass=True)


def curriculum(passes: int = 4, rules: Rules | None = None, **others: Any) -> Curriculum:
    found = stages(**others)
    return Curriculum(found, [passes] * len(found), rules)


def run(found: Curriculum, rates: Sequence[float], every: int = 4) -> list[int]:
    """Observe an evaluation every so many steps; return the stage after each."""
    after = []
    for index, rate in enumerate(rates):
        found.observe(index * every, rate)
        after.append(found.place.stage)
    return after


def test_a_stage_ends_when_nothing_is_missing() -> None:
    assert run(curriculum(), [1.0, 1.0, 1.0, 1.0, 1.0]) == [0, 1, 1, 2, 2]


def test_every_condition_can_hold_a_stage() -> None:
    assert run(curriculum(min_evaluations=4), [1.0] * 4) == [0, 0, 0, 1]
    assert run(curriculum(passes=9), [1.0] * 4) == [0, 0, 0, 1]
    assert run(curriculum(full_pass=False, passes=99), [1.0] * 4) == [0, 1, 1, 2]
    assert run(curriculum(min_steps=12), [1.0] * 4) == [0, 0, 0, 1]
    assert run(curriculum(), [0.0, 0.99, 0.0, 1.0]) == [0, 0, 0, 1], "the mean of the last two counts"


def test_the_steps_of_a_stage_are_counted_from_its_own_start() -> None:
    """Where they were counted from the start of the run, the later stages would be left at once."""
    found = curriculum(passes=8)
    run(found, [1.0] * 3)
    assert found.place == CurriculumPosition(1, 1, 8)
    assert not found.observe(12, 1.0)
    assert found.observe(16, 1.0)
    assert found.place == CurriculumPosition(2, 1, 16)


def test_an_evaluation_is_counted_once() -> None:
    """Several callbacks may report one evaluation, and a resumed run one that it knows."""
    found = curriculum(min_evaluations=3)
    for _ in range(3):
        for step in (0, 4):
            found.observe(step, 1.0)
    assert (len(found.evaluations), found.place.stage) == (2, 0)
    found.observe(8, 1.0)
    before = found.state_dict()
    assert found.place.stage == 1
    for step in (8, 4, 0):
        assert found.observe(step, 1.0) is None
    assert found.state_dict() == before


def test_reading_changes_nothing() -> None:
    found = curriculum()
    run(found, [1.0, 0.3, 0.4])
    first = (found.metrics(9), found.state_dict())
    assert all((found.metrics(9), found.state_dict()) == first for _ in range(3))


@pytest.mark.parametrize("rate", [math.nan, -0.1, 1.1, math.inf])
def test_a_number_that_is_no_pass_rate_is_refused(rate: float) -> None:
    """A loss, a reward or a default in place of a missing evaluation has promoted models."""
    found = curriculum()
    with pytest.raises(
        TaskError, match=r"^the evaluation of step 3 gave the pass rate .*, not one from 0 to 1$"
    ):
        found.observe(3, rate)
    assert not found.evaluations


def test_thresholds_rise_with_the_rounds_up_to_the_limit() -> None:
    rules = Rules(max_rounds=5)
    found = Curriculum(stages(1, 0.65), [0], rules)
    seen = []
    for number in range(1, 6):
        found.place = CurriculumPosition(0, number)
        seen.append(found.threshold)
    assert seen == [0.65, 0.75, 0.85, 0.95, 0.95], "to the last bit: 17 of 20 right is 0.85"


def test_after_the_last_round_the_last_stage_stays() -> None:
    found = curriculum(count=2, rules=Rules(max_rounds=2))
    run(found, [1.0] * 40)
    assert (found.place.stage, found.place.round) == (1, 2)
    assert [(a.to_stage, a.to_round) for a in found.advancements] == [(1, 1), (0, 2), (1, 2)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0])), max_size=30),
    st.integers(0, 12),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
def test_any_history(
    gaps: list[tuple[int, float]], passes: int, least: int, full: bool, data: st.DataObject
) -> None:
    """At most one stage an evaluation, never without its conditions; and a state that went through JSON goes on."""
    made = lambda: curriculum(passes, full_pass=full, min_evaluations=least)  # noqa: E731
    found, kill = made(), data.draw(st.integers(0, len(gaps)))
    step, other = 0, made()
    for index, (gap, rate) in enumerate(gaps):
        if index == kill:
            other.load_state_dict(json.loads(json.dumps(found.state_dict())))
        old, step = found.place, step + gap
        advanced = found.observe(step, rate)
        if index >= kill:
            assert other.observe(step, rate) == advanced
        own = [e.performance for e in found.evaluations if (e.stage, e.round) == (old.stage, old.round)]
        if advanced is None:
            assert found.place == old
            continue
        assert found.place.start_step == step
        assert found.place.stage == (old.stage + 1) % 3
        assert len(own) >= least
        assert sum(own[-2:]) / len(own[-2:]) >= advanced.threshold - 1e-12
        assert step - old.start_step >= (passes if full else 0)
    if kill < len(gaps):
        assert other.state_dict() == found.state_dict()
    places = [(a.to_round, a.to_stage) for a in found.advancements]
    assert places == sorted(set(places))
    assert all(first.step < second.step for first, second in pairwise(found.evaluations))


def test_the_state_has_the_documented_fields() -> None:
    found = curriculum()
    run(found, [1.0, 1.0, 0.2])
    state = found.state_dict()
    assert {"current_stage", "stage_count", "last_update_step", "performance_history"} <= state.keys()
    assert {"stage_advancement_log", "stages", "current_round", "schema_version"} <= state.keys()
    assert (state["current_stage"], state["last_update_step"]) == (1, 8)
    assert {
        "name",
        "dataset_levels",
        "complexity_range",
        "performance_threshold",
        "min_evaluations",
    } <= state["stages"][0].keys()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("current_stage", -1, "is damaged"),
        ("current_stage", 7, "is damaged"),
        ("current_stage", "1", "is damaged"),
        ("current_round", 0, "is damaged"),
        ("performance_history", [{"step": 1}], "is damaged"),
        ("performance_history", None, "is damaged"),
        ("stages", [], "is damaged"),
        ("schema_version", 2, "schema_version 2"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_taken_over(field: str, value: object, says: str) -> None:
    """A state that cannot be read must not start the curriculum at its first stage again."""
    found = curriculum()
    run(found, [1.0, 1.0, 1.0])
    state = found.state_dict() | {field: value}
    other = curriculum()
    with pytest.raises(TaskError, match=says):
        other.load_state_dict(state)
    assert other.place == CurriculumPosition()


def test_stages_are_found_again_by_name() -> None:
    found = curriculum()
    run(found, [1.0, 1.0])
    added = read_stages(
        [{"name": name, "threshold": 0.3} for name in ("s0", "new", "s1")],
        {},
        min_evaluations=2,
        full_pass=True,
    )
    other = Curriculum(added, [4, 4, 4])
    other.load_state_dict(found.state_dict())
    assert other.stage.name == "s1"
    gone = Curriculum(added[:1], [4])
    with pytest.raises(TaskError, match=r"is at stage 's1', which curriculum\.stages does not have"):
        gone.load_state_dict(found.state_dict())


@pytest.mark.parametrize("name", task_names())
def test_the_default_stages_find_problems_in_every_task(name: str) -> None:
    found = read_stages(None, {}, min_evaluations=5, full_pass=True)
    problems = [problem for level in range(1, 6) for problem in make_task(name, level).draw(100)]
    parts = problems_of(found, problems, 8, "task.train_size")
    assert len(parts) == len(DEFAULT_STAGES) == 6
    for stage, part in zip(found, parts, strict=True):
        assert part == tuple(p for p in problems if stage.admits(p))
        assert stage.complexity is not None
        low, high = stage.complexity
        assert all(p.level in stage.levels and low <= (p.complexity or 0.0) <= high for p in part)
    assert len(parts[-1]) == len(problems)


def test_an_empty_stage_is_an_error_and_never_the_whole_dataset() -> None:
    found = read_stages(
        [{"name": "far", "levels": ["master"], "complexity": [9, 10], "threshold": 0.5}],
        {},
        min_evaluations=1,
        full_pass=True,
    )
    problems = make_task("copy", 1).draw(20)
    with pytest.raises(
        TaskError, match=r"stage 'far' of the curriculum \(master, complexity 9 to 10\) has 0 of 20"
    ):
        problems_of(found, problems, 4, "task.train_size")


def test_a_problem_that_does_not_tell_is_refused() -> None:
    (stage,) = read_stages(
        [{"name": "a", "complexity": [0, 10], "threshold": 0.5}], {}, min_evaluations=1, full_pass=True
    )
    with pytest.raises(TaskError, match="has no complexity, which stage 'a' of the curriculum asks for"):
        stage.admits(Problem("t", "p", "a"))


WRONG = {
    "is empty": [],
    r"\[0\] is 3; a stage is a mapping": [3],
    "no key 'level'; did you mean 'levels'": [{"name": "a", "threshold": 0.5, "level": [1]}],
    "needs a name": [{"threshold": 0.5}],
    "threshold=None must be a pass rate": [{"name": "a"}],
    "threshold=0 must be a pass rate": [{"name": "a", "threshold": 0}],
    "levels: 'hard' is not a level": [{"name": "a", "threshold": 0.5, "levels": ["hard"]}],
    "levels='basic' must be a list": [{"name": "a", "threshold": 0.5, "levels": "basic"}],
    "wrong order": [{"name": "a", "threshold": 0.5, "complexity": [5, 1]}],
    "12 is not a complexity": [{"name": "a", "threshold": 0.5, "complexity": [5, 12]}],
    "min_evaluations=0 must be": [{"name": "a", "threshold": 0.5, "min_evaluations": 0}],
    "full_pass='yes' must be": [{"name": "a", "threshold": 0.5, "full_pass": "yes"}],
    "two stages named 'a'": [{"name": "a", "threshold": 0.5}, {"name": "a", "threshold": 0.5}],
}


@pytest.mark.parametrize("says", WRONG)
def test_stages_that_cannot_be(says: str) -> None:
    with pytest.raises(TaskError, match=says):
        read_stages(WRONG[says], {}, min_evaluations=1, full_pass=True)


def test_thresholds_by_name() -> None:
    found = read_stages(None, {"foundation": 0.3}, min_evaluations=5, full_pass=True)
    assert [stage.threshold for stage in found] == [0.3, 0.60, 0.55, 0.50, 0.45, 0.40]
    with pytest.raises(
        TaskError, match=r"curriculum\.thresholds: there is no stage 'foundations'; did you mean"
    ):
        read_stages(None, {"foundations": 0.3}, min_evaluations=5, full_pass=True)


def test_a_recording_decides_where_it_is_replayed() -> None:
    found = Curriculum(stages(), [0, 0, 0], recorded=True)
    run(found, [1.0] * 5)
    assert found.place == CurriculumPosition()
    assert len(found.evaluations) == 5
    assert found.follow(CurriculumPosition(2, 1, 17), 17).performance is None
    assert found.stage.name == "s2"
