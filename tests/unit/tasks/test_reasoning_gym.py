"""The optional reasoning-gym: what is refused, with a stand-in package; then the real one where installed."""

import dataclasses
import re
import sys
import types
from typing import Any

import pytest

from regress.errors import TaskError
from regress.tasks.problem import is_correct
from regress.tasks.problem_split import make_dataset
from regress.tasks.reasoning_gym import ALLOWED, REFUSED
from regress.tasks.task_registry import make_task


@dataclasses.dataclass
class Config:
    """The stand-in's settings, named as the package names its own."""

    min_value: int = 0
    max_value: int = 9
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Assert, as the package does."""
        assert self.min_value <= self.max_value, "max_value must be >= min_value"


class Items:
    """Numbers from min_value to max_value, item i made from seed + i."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, str]:
        assert self.config.seed is not None
        span = self.config.max_value - self.config.min_value + 1
        value = self.config.min_value + (self.config.seed + index) * 7919 % span
        return {"question": f" twice {value}?\n", "answer": f"{2 * value} "}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Must never be called."""
        raise AssertionError("the package's verifier was called")


class Curriculum:
    """Level l has numbers up to 9, 99, 999."""

    attributes = {"value": types.SimpleNamespace(levels=[9, 99, 999])}

    def set_global_level(self, level: int) -> None:
        """As in the package, from 0."""
        self.level = level

    def generate_configuration(self) -> Config:
        """The settings of the level."""
        return Config(max_value=self.attributes["value"].levels[self.level])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"products": (Items, Config)}
    factory.create_curriculum = lambda name: Curriculum()
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("stand_in")
def test_problems_have_distinct_prompts_and_are_judged_by_comparing() -> None:
    dataset = make_dataset(make_task("reasoning_gym/products", level=2), 60, 20)

    problems = dataset.train + dataset.evaluation
    assert len({problem.prompt for problem in problems}) == 80
    for problem in problems:
        value = int(problem.prompt.removeprefix("twice ").removesuffix("?"))
        assert (problem.answer, problem.level) == (str(2 * value), 2)
        assert is_correct(problem, str(2 * value))
        assert not is_correct(problem, f"{2 * value}.0")


@pytest.mark.usefixtures("stand_in")
def test_neighboring_seeds_do_not_share_their_items() -> None:
    first, again, other = (make_task("reasoning_gym/products", 3, seed=seed).draw(50) for seed in (1, 1, 2))

    assert first == again
    assert len({p.prompt for p in first} & {p.prompt for p in other}) < 20


@pytest.mark.usefixtures("stand_in")
def test_a_space_that_is_too_small_is_told() -> None:
    with pytest.raises(
        TaskError, match="task 'reasoning_gym/products' at level 1 yields only 10 distinct prompts"
    ):
        make_dataset(make_task("reasoning_gym/products"), 10, 1)


@pytest.mark.usefixtures("stand_in")
def test_settings_override_those_of_the_level() -> None:
    problems = make_task("reasoning_gym/products", 1, {"min_value": 5}).draw(5)

    assert {problem.prompt for problem in problems} == {f"twice {value}?" for value in range(5, 10)}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("level", "params", "message"),
    [
        (0, {}, "task.level: task 'reasoning_gym/products' has levels 1 to 3, not 0"),
        (4, {}, "task.level: task 'reasoning_gym/products' has levels 1 to 3, not 4"),
        (
            1,
            {"maxvalue": 3},
            "task 'reasoning_gym/products' has no parameter 'maxvalue'; did you mean 'max_value'",
        ),
        (1, {"seed": 3}, "task.params.seed: set the top-level seed and task.train_size/eval_size instead"),
        (1, {"size": 3}, "task.params.size: set the top-level seed"),
        (1, {"min_value": 10}, "(max_value must be >= min_value); change task.level or task.params"),
        (
            1,
            {"min_value": "x"},
            "does not accept 'reasoning_gym/products' at level 1 with {'min_value': 'x'}",
        ),
    ],
)
def test_what_the_dataset_does_not_take_is_refused(level: int, params: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        make_task("reasoning_gym/products", level, params)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "countdown",
            "'reasoning_gym/countdown' is refused: its verifier runs the model's text as code (sympy.",
        ),
        ("puzzle24", "is refused: its verifier runs the model's text as code (sympy.parse_expr)"),
        ("polynomial_multiplication", "its verifier runs the model's text as code (sympy.parse_expr)"),
        ("n_queens", "its verifier runs the model's text as code (eval)"),
        ("polynomial_equations", "several answers are right"),
        ("game_of_life_halting", "its verifier accepts any text when the answer is False"),
        ("sudoku", "is not among the reasoning-gym datasets known to have one right answer as text"),
        ("chainsum", "one right answer as text; did you mean 'chain_sum'?"),
    ],
)
def test_unsafe_and_unknown_datasets_are_refused_before_the_package_loads(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    with pytest.raises(TaskError, match=re.escape(message)):
        make_task(f"reasoning_gym/{name}")


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    with pytest.raises(TaskError, match=re.escape("run pip install 'reasoning-gym>=0.1.25'")):
        make_task("reasoning_gym/chain_sum")


def test_no_dataset_is_both_allowed_and_refused() -> None:
    assert not ALLOWED & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_every_allowed_dataset_of_the_real_package_yields_problems(name: str) -> None:
    factory = pytest.importorskip(
        "reasoning_gym.factory", reason="the optional extra reasoning-gym is not installed"
    )

    first, again, other = (make_task(f"reasoning_gym/{name}", 1, seed=seed).draw(60) for seed in (1, 1, 2))

    assert first == again != other
    assert len({problem.prompt for problem in first}) == len(first) >= 50
    assert all(is_correct(problem, problem.answer) for problem in first)
    assert REFUSED.keys() | ALLOWED <= factory.DATASETS.keys()
