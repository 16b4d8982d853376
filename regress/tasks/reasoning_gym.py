"""Datasets of the optional reasoning-gym package that have exactly one correct answer.

Only questions and answers are taken from the package (facts below: version 0.1.25). Its scoring functions are
never called: several hand the model's text to `eval` or `sympy.parse_expr`, which run it, and many pay for
wrong answers. A dataset in which several answers are right cannot be judged by comparing, and is refused.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from regress.errors import TaskError
from regress.optional_packages import install
from regress.tasks.difficulty_vocabulary import HIGHEST
from regress.tasks.name_suggestions import nearest
from regress.tasks.portable_draws import below, generator
from regress.tasks.problem import WHITESPACE, Problem

ALLOWED = frozenset(
    {
        "base_conversion",
        "caesar_cipher",
        "chain_sum",
        "count_bits",
        "count_primes",
        "gcd",
        "isomorphic_strings",
        "lcm",
        "leg_counting",
        "letter_counting",
        "products",
        "ransom_note",
        "simple_equations",
        "spell_backward",
        "syllogism",
        "word_sequence_reversal",
    }
)

_RUNS_TEXT = "its verifier runs the model's text as code ({})"
_MANY = "several answers are right, and its verifier is the only judge of them"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "countdown",
            "puzzle24",
            "polynomial_multiplication",
            "simple_integration",
            "intermediate_integration",
        ),
        _RUNS_TEXT.format("sympy.parse_expr"),
    ),
    **dict.fromkeys(
        ("spiral_matrix", "binary_matrix", "n_queens", "string_insertion"), _RUNS_TEXT.format("eval")
    ),
    **dict.fromkeys(("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"), _MANY),
    **dict.fromkeys(("sokoban", "jugs", "word_ladder", "knight_swap", "tower_of_hanoi"), _MANY),
    "polynomial_equations": _MANY,
    "codeio": "it runs generated programs and does not repeat itself for a seed",
    "game_of_life_halting": "its verifier accepts any text when the answer is False",
    "prime_factorization": "its verifier fails on text that is not a number",
    "basic_arithmetic": "its generator evaluates text made from its settings (chain_sum does not)",
    "composite": "it is made of other datasets",
}
"""Known datasets that are refused, with the reason."""

_RESERVED = ("seed", "size")
_PATIENCE = 20  # draws for each problem wanted, before the space of prompts counts as exhausted


@dataclass(frozen=True)
class GymTask:
    """Dataset of reasoning-gym; `config` is its configuration without seed and size.

    All problems of a level have one complexity: 10 for the highest of its curriculum, in proportion below.
    """

    name: str
    level: int
    complexity: float
    config: Any
    build: Any
    seed: int

    @property
    def size(self) -> int | None:
        """None: problems are generated."""
        return None

    def draw(self, count: int) -> list[Problem]:
        """Return `count` problems with distinct prompts; fewer if 20 draws per problem do not find enough."""
        # the package seeds item i with seed + i: neighboring seeds would give nearly the same items
        seed = below(generator("reasoning_gym", self.name, self.seed), 2**31)
        size = _PATIENCE * count
        items = self.build(dataclasses.replace(self.config, seed=seed, size=size))
        found: dict[str, Problem] = {}
        for index in range(size):
            if len(found) == count:
                break
            item = items[index]
            prompt = item["question"].strip(WHITESPACE)
            answer = item["answer"].strip(WHITESPACE)
            found.setdefault(
                prompt, Problem(self.name, prompt, answer, self.level, complexity=self.complexity)
            )
        return list(found.values())


def make_gym_task(name: str, level: int, params: Mapping[str, Any], seed: int) -> GymTask:
    """Return the dataset `name` at a level of its own curriculum, single settings overridden by `params`.

    Raises TaskError if the dataset is not among `ALLOWED`, if the package is missing, and for a level or
    setting that the dataset does not have or does not accept.
    """
    full = f"reasoning_gym/{name}"
    _check_allowed(full, name)
    _load("reasoning_gym")  # registers the datasets
    factory = _load("reasoning_gym.factory")
    build, _ = factory.DATASETS[name]
    config, highest = _configure(full, factory.create_curriculum(name), level, params)
    return GymTask(full, level, HIGHEST * level / highest, config, build, seed)


def _check_allowed(full: str, name: str) -> None:
    if name in REFUSED:
        raise TaskError(f"task.name: {full!r} is refused: {REFUSED[name]}; {nearest(name, ALLOWED)}")
    if name not in ALLOWED:
        raise TaskError(f"""task.name: {full!r} is not among the reasoning-gym datasets known to have one right answer
        as text; {nearest(name, ALLOWED)}""")


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(f"""task.name: reasoning_gym/... needs the optional package reasoning-gym, but {error}; run
        {install("reasoning-gym")}""") from error


def _configure(full: str, curriculum: Any, level: int, params: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the configuration of a level, and the number of levels."""
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= highest:
        raise TaskError(f"task.level: task {full!r} has levels 1 to {highest}, not {level!r}")
    curriculum.set_global_level(level - 1)
    config = curriculum.generate_configuration()
    known = {field.name for field in dataclasses.fields(config)} - set(_RESERVED)
    for key in params:
        if key in _RESERVED:
            raise TaskError(
                f"task.params.{key}: set the top-level seed and task.train_size/eval_size instead"
            )
        if key not in known:
            raise TaskError(
                f"task.params: task {full!r} has no parameter {key!r}; {nearest(str(key), known)}"
            )
    config = dataclasses.replace(config, **params)
    try:
        config.validate()
    except Exception as error:  # the package asserts, and compares values of any type
        reason = str(error).partition("\n")[0]
        raise TaskError(f"""task.params: reasoning-gym does not accept {full!r} at level {level} with {dict(params)}
        ({reason}); change task.level or task.params""") from error
    return config, highest
