"""Difficulty levels of the built-in tasks, and the ranges of their parameters.

At every level prompts have at most 28 characters and answers at most 15, so that with the chat template's
special tokens they fit the default lengths of the `data` section; and every level has more than a thousand
distinct prompts but `parity` 1, which has 960, and `gcd` 1.

The complexity of a problem follows from its size: the letters of the word (of the text that is searched, in
`letter_counting`), the digits of all terms (`chain_sum`, `modular_sum`), the larger number (`gcd`). The smallest
problem of level 1 has complexity 0, the largest of level n has 2n, and sizes between them are interpolated, so that a
level overlaps with its neighbors as its sizes do.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase

from regress.errors import TaskError
from regress.tasks import generators
from regress.tasks.difficulty import on_scale
from regress.tasks.names import nearest
from regress.tasks.strata import Stratum

Params = Mapping[str, int | str]

LIMITS = {
    "min_length": (1, 64),
    "max_length": (1, 64),
    "min_terms": (2, 16),
    "max_terms": (2, 16),
    "min_digits": (1, 9),
    "max_digits": (1, 9),
    "max_value": (2, 400),  # gcd enumerates all pairs
    "modulus": (2, 1000),
}
"""Smallest and largest allowed value of each integer parameter."""


@dataclass(frozen=True)
class Family:
    """Generator with its levels: `levels[i]` holds all parameters of level i + 1.

    `size` measures a prompt, and `extremes` gives the smallest and largest size under parameters.
    """

    strata: Callable[..., Iterable[Stratum]]
    levels: tuple[Params, ...]
    size: Callable[[str], int]
    extremes: Callable[[Params], tuple[int, int]]

    def complexity(self, prompt: str) -> float:
        """Return the complexity of a problem, from 0 to 10."""
        smallest = self.extremes(self.levels[0])[0]
        return on_scale(self.size(prompt), [smallest, *(self.extremes(level)[1] for level in self.levels)])


def _word_size(prompt: str) -> int:
    return len(prompt.rpartition(" ")[2])


def _word_extremes(params: Params) -> tuple[int, int]:
    return int(params["min_length"]), int(params["max_length"])


def _terms_size(prompt: str) -> int:
    return sum(character.isdigit() for character in prompt.partition(" ")[0])


def _chain_extremes(params: Params) -> tuple[int, int]:
    ends = ((int(params[f"{end}_terms"]), int(params[f"{end}_digits"])) for end in ("min", "max"))
    smallest, largest = (terms * digits for terms, digits in ends)
    return smallest, largest


def _modular_extremes(params: Params) -> tuple[int, int]:
    digits = len(str(params["max_value"]))
    return int(params["min_terms"]), int(params["max_terms"]) * digits


def _gcd_size(prompt: str) -> int:
    return max(map(int, re.findall(r"\d+", prompt)))


def _gcd_extremes(params: Params) -> tuple[int, int]:
    return 1, int(params["max_value"])


_WORD = (_word_size, _word_extremes)


def _levels(names: str, *rows: tuple[int | str, ...]) -> tuple[Params, ...]:
    """Return one mapping per row (a level), with one value for each of the parameters named."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


AZ = ascii_lowercase

FAMILIES: Mapping[str, Family] = {
    "chain_sum": Family(
        generators.chain_sum,
        _levels(
            "min_terms max_terms min_digits max_digits",
            (2, 3, 1, 1),
            (2, 3, 1, 2),
            (3, 4, 1, 2),
            (3, 5, 2, 3),
            (4, 6, 2, 3),
        ),
        _terms_size,
        _chain_extremes,
    ),
    "copy": Family(
        generators.copy,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:6]),
            (4, 7, AZ[:10]),
            (5, 9, AZ[:16]),
            (6, 11, AZ),
            (8, 14, AZ),
        ),
        *_WORD,
    ),
    "gcd": Family(
        generators.gcd, _levels("max_value", (30,), (60,), (100,), (200,), (400,)), _gcd_size, _gcd_extremes
    ),
    "letter_counting": Family(
        generators.letter_counting,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:4]),
            (4, 7, AZ[:5]),
            (6, 10, AZ[:6]),
            (8, 13, AZ[:8]),
            (10, 17, AZ[:10]),
        ),
        *_WORD,
    ),
    "modular_sum": Family(
        generators.modular_sum,
        _levels(
            "min_terms max_terms max_value modulus",
            (2, 3, 9, 5),
            (2, 4, 9, 7),
            (3, 5, 9, 10),
            (3, 6, 20, 11),
            (4, 7, 99, 13),
        ),
        _terms_size,
        _modular_extremes,
    ),
    "parity": Family(
        generators.parity,
        _levels("min_length max_length", (6, 9), (7, 11), (8, 13), (10, 16), (12, 20)),
        *_WORD,
    ),
    "reverse_string": Family(
        generators.reverse_string,
        _levels(
            "min_length max_length alphabet",
            (3, 5, AZ[:6]),
            (4, 6, AZ[:10]),
            (5, 8, AZ[:16]),
            (6, 10, AZ),
            (8, 14, AZ),
        ),
        *_WORD,
    ),
    "sort": Family(
        generators.sort,
        _levels(
            "min_length max_length alphabet",
            (3, 5, "012345"),
            (4, 6, "0123456789"),
            (5, 8, AZ[:16]),
            (6, 10, AZ),
            (8, 14, AZ),
        ),
        *_WORD,
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
            raise TaskError(
                f"task.params.alphabet: task {name!r} needs different ASCII letters or digits in one string "
                f"(quote digits in YAML), not {value!r}"
            )
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
            raise TaskError(
                f"task.params.{key}: task {name!r} would have {key} {value} above {upper} {params[upper]}; "
                f"set both {key} and {upper}"
            )
