"""Difficulty levels of the built-in tasks, and the ranges of their parameters.

At every level prompts have at most 28 characters and answers at most 15, so that with the chat template's
special tokens they fit the default lengths of the `data` section; and every level has more than a thousand
distinct prompts but `parity` 1, which has 960, and `gcd` 1. `regress.tasks.problem_sizes` tells what makes a problem
complex.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase

from regress.errors import TaskError
from regress.tasks import problem_sizes, task_generators
from regress.tasks.conversation_turns import answer_text, call_text
from regress.tasks.difficulty_vocabulary import on_scale
from regress.tasks.name_suggestions import nearest
from regress.tasks.problem_sizes import Measure, Params
from regress.tasks.prompt_strata import Stratum

LIMITS = {
    "min_length": (1, 64),
    "max_length": (1, 64),
    "min_terms": (2, 16),
    "max_terms": (2, 16),
    "min_digits": (1, 9),
    "max_digits": (1, 9),
    "max_value": (2, 400),  # gcd enumerates all pairs
    "modulus": (2, 1000),
    "min_syllables": (2, 4),
    "max_syllables": (2, 4),
    "relations": (1, 6),
}
"""Smallest and largest allowed value of each integer parameter."""


@dataclass(frozen=True)
class Family:
    """Generator with its levels: `levels[i]` holds all parameters of level i + 1.

    `measure` gives the size of a problem. `tool` is called with the prompt before the answer is given; None: the answer
    is given at once.
    """

    strata: Callable[..., Iterable[Stratum]]
    levels: tuple[Params, ...]
    measure: Measure
    tool: str | None = None

    def complexity(self, prompt: str) -> float:
        """Return the complexity of a problem, from 0 to 10."""
        extremes = [self.measure.extremes(level) for level in self.levels]
        return on_scale(self.measure.size(prompt), [extremes[0][0], *(largest for _, largest in extremes)])

    def solution(self, prompt: str, answer: str) -> tuple[str, ...]:
        """Return the completions of a right conversation, if it has several turns."""
        return () if self.tool is None else (call_text(self.tool, prompt), answer_text(answer))


def _levels(names: str, *rows: tuple[int | str, ...]) -> tuple[Params, ...]:
    """Return one mapping per row (a level), with one value for each of the parameters named."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


AZ = ascii_lowercase

FAMILIES: Mapping[str, Family] = {
    "calculate": Family(
        task_generators.calculate,
        _levels("min_terms max_terms max_digits", (2, 3, 1), (2, 3, 2), (3, 4, 2), (4, 5, 2), (5, 6, 2)),
        problem_sizes.EXPRESSIONS,
        tool="calculator",
    ),
    "chain_sum": Family(
        task_generators.chain_sum,
        _levels(
            "min_terms max_terms min_digits max_digits",
            (2, 3, 1, 1),
            (2, 3, 1, 2),
            (3, 4, 1, 2),
            (3, 5, 2, 3),
            (4, 6, 2, 3),
        ),
        problem_sizes.CHAINS,
    ),
    "copy": Family(
        task_generators.copy,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:6]),
            (4, 7, AZ[:10]),
            (5, 9, AZ[:16]),
            (6, 11, AZ),
            (8, 14, AZ),
        ),
        problem_sizes.WORDS,
    ),
    "gcd": Family(
        task_generators.gcd, _levels("max_value", (30,), (60,), (100,), (200,), (400,)), problem_sizes.GCD
    ),
    "letter_counting": Family(
        task_generators.letter_counting,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:4]),
            (4, 7, AZ[:5]),
            (6, 10, AZ[:6]),
            (8, 13, AZ[:8]),
            (10, 17, AZ[:10]),
        ),
        problem_sizes.WORDS,
    ),
    "lookup": Family(
        task_generators.lookup,
        _levels(
            "min_syllables max_syllables relations", (2, 2, 3), (2, 2, 6), (2, 3, 4), (2, 3, 6), (2, 4, 6)
        ),
        problem_sizes.FACTS,
        tool="search",
    ),
    "modular_sum": Family(
        task_generators.modular_sum,
        _levels(
            "min_terms max_terms max_value modulus",
            (2, 3, 9, 5),
            (2, 4, 9, 7),
            (3, 5, 9, 10),
            (3, 6, 20, 11),
            (4, 7, 99, 13),
        ),
        problem_sizes.MODULAR_SUMS,
    ),
    "parity": Family(
        task_generators.parity,
        _levels("min_length max_length", (6, 9), (7, 11), (8, 13), (10, 16), (12, 20)),
        problem_sizes.WORDS,
    ),
    "reverse_string": Family(
        task_generators.reverse_string,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:6]),
            (4, 6, AZ[:10]),
            (5, 8, AZ[:16]),
            (6, 10, AZ),
            (8, 14, AZ),
        ),
        problem_sizes.WORDS,
    ),
    "sort": Family(
        task_generators.sort,
        _levels(
            "min_length max_length alphabet",
            (3, 5, "012345"),
            (4, 6, "0123456789"),
            (5, 8, AZ[:16]),
            (6, 10, AZ),
            (8, 14, AZ),
        ),
        problem_sizes.WORDS,
    ),
}


def resolve(name: str, level: int, params: Params) -> Params:
    """Return the parameters of a built-in task: those of the level, overridden by `params`.

    Raises TaskError for a level or parameter that the task does not have, and for a value out of its range.
    """
    levels = FAMILIES[name].levels
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= len(levels):
        raise TaskError(f"task.level: task {name!r} has levels 1 to {len(levels)}, not {level!r}")
    defaults = levels[level - 1]
    for key, value in params.items():
        if key not in defaults:
            raise TaskError(
                f"task.params: task {name!r} has no parameter {key!r}; {nearest(str(key), defaults)}"
            )
        _check_value(name, key, value)
    resolved = {**defaults, **params}
    _check_order(name, resolved)
    return resolved


def _check_value(name: str, key: str, value: object) -> None:
    if key == "alphabet":
        if not (
            isinstance(value, str) and value.isascii() and value.isalnum() and len(set(value)) == len(value)
        ):
            raise TaskError(f"""task.params.alphabet: task {name!r} needs different ASCII letters or digits in one
            string (quote digits in YAML), not {value!r}""")
        return
    low, high = LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TaskError(
            f"task.params.{key}: task {name!r} needs a whole number from {low} to {high}, not {value!r}"
        )


def _check_order(name: str, params: Params) -> None:
    for key, value in params.items():
        upper = key.replace("min_", "max_")
        if upper != key and isinstance(value, int) and value > int(params[upper]):
            raise TaskError(f"""task.params.{key}: task {name!r} would have {key} {value} above {upper} {params[upper]};
            set both {key} and {upper}""")
