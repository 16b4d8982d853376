"""The split by prompt and the order of training."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import TaskError
from regress.tasks.problem import Problem
from regress.tasks.problem_split import make_dataset, training_batch
from regress.tasks.task_registry import make_task, task_names

PROBLEMS = [Problem("t", f"p{index}", "a") for index in range(23)]


@settings(deadline=None)
@given(
    name=st.sampled_from(task_names()),
    seed=st.integers(),
    train_size=st.integers(1, 400),
    eval_size=st.integers(0, 200),
)
def test_no_prompt_is_in_both_parts_or_twice_in_one(
    name: str, seed: int, train_size: int, eval_size: int
) -> None:
    dataset = make_dataset(make_task(name, 1, seed=seed), train_size, eval_size)

    prompts = [problem.prompt for problem in dataset.train + dataset.evaluation]
    assert (len(dataset.train), len(dataset.evaluation)) == (train_size, eval_size)
    assert len(set(prompts)) == train_size + eval_size


@settings(deadline=None)
@given(name=st.sampled_from(task_names()), seed=st.integers())
def test_the_same_seed_gives_the_same_split_and_another_seed_another(name: str, seed: int) -> None:
    first, again, other = (make_dataset(make_task(name, 2, seed=s), 60, 20) for s in (seed, seed, seed + 1))

    assert first == again
    assert first.evaluation != other.evaluation


def test_both_parts_have_the_same_mix() -> None:
    dataset = make_dataset(make_task("reverse_string", 1), 512, 128)

    def mean_length(problems: tuple[Problem, ...]) -> float:
        return sum(len(problem.answer) for problem in problems) / len(problems)

    assert abs(mean_length(dataset.train) - mean_length(dataset.evaluation)) < 0.3


def test_the_whole_space_can_be_used_and_one_more_is_an_error() -> None:
    params = {"min_length": 2, "max_length": 3, "alphabet": "ab"}
    task = make_task("copy", 1, params)

    assert len(make_dataset(task, 8, 4).train) == 8
    with pytest.raises(
        TaskError,
        match=re.escape(
            "task 'copy' at level 1 yields only 12 distinct prompts, but train_size 9 and eval_size 4 "
            "need 13: lower task.train_size or task.eval_size, raise task.level, or widen task.params"
        ),
    ):
        make_dataset(task, 9, 4)


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, -1)])
def test_impossible_sizes_are_named(sizes: tuple[int, int]) -> None:
    with pytest.raises(
        TaskError, match=r"task.train_size -?\d must be at least 1 and task.eval_size -?\d at least 0"
    ):
        make_dataset(make_task("copy"), *sizes)


@settings(deadline=None)
@given(size=st.integers(1, 23), batch=st.integers(1, 23), epoch=st.integers(0, 5), seed=st.integers())
def test_an_epoch_visits_each_problem_at_most_once_and_leaves_less_than_a_step(
    size: int, batch: int, epoch: int, seed: int
) -> None:
    problems, batch = PROBLEMS[:size], min(batch, size)
    steps = size // batch

    seen = [p.prompt for s in range(steps) for p in training_batch(problems, epoch * steps + s, batch, seed)]

    assert len(set(seen)) == len(seen) == steps * batch > size - batch


def test_a_batch_depends_on_nothing_but_seed_and_step() -> None:
    forward = [training_batch(PROBLEMS, step, 4, seed=3) for step in range(20)]
    backward = [training_batch(PROBLEMS, step, 4, seed=3) for step in reversed(range(20))]

    assert forward == backward[::-1]
    assert forward != [training_batch(PROBLEMS, step, 4, seed=4) for step in range(20)]


def test_epochs_differ_in_order_and_in_what_they_leave_out() -> None:
    epochs = [
        [p.prompt for s in range(5) for p in training_batch(PROBLEMS, 5 * e + s, 4, 0)] for e in range(30)
    ]

    assert len({tuple(epoch) for epoch in epochs}) == 30
    assert {prompt for epoch in epochs[:10] for prompt in epoch} == {problem.prompt for problem in PROBLEMS}


@pytest.mark.parametrize("batch", [0, 24])
def test_a_step_needs_enough_problems(batch: int) -> None:
    with pytest.raises(
        TaskError, match=f"data.prompts_per_step {batch} must lie between 1 and the 23 training problems"
    ):
        training_batch(PROBLEMS, 0, batch, 0)


def test_texts_hold_every_problem() -> None:
    dataset = make_dataset(make_task("gcd"), 3, 2)

    assert dataset.texts() == [
        text for p in dataset.train + dataset.evaluation for text in (p.prompt, p.answer)
    ]
