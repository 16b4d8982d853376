"""Sizes of the built-in tasks' problems, from which their complexity follows.

| task | size |
|---|---|
| copy, letter_counting, parity, reverse_string, sort | letters of the word, or of the text that is searched |
| calculate, chain_sum, modular_sum | digits of all terms |
| gcd | the larger number |
| lookup | syllables of the name times the number of relations, and the place of the relation among them |

The smallest problem of level 1 has complexity 0, the largest of level n has 2n, and sizes between them are
interpolated, so that levels overlap in complexity as they do in sizes (levels 3 and 4 of `lookup` end alike, at 8).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from regress.tasks.knowledge_base import RELATIONS

Params = Mapping[str, int | str]


@dataclass(frozen=True)
class Measure:
    """Function `size` of a prompt, and its smallest and largest value under parameters."""

    size: Callable[[str], int]
    extremes: Callable[[Params], tuple[int, int]]


def _integers(params: Params, *names: str) -> tuple[int, ...]:
    return tuple(int(params[name]) for name in names)


def _digits(prompt: str) -> int:
    return sum(character.isdigit() for character in prompt.partition(" ")[0])


def _of_words(params: Params) -> tuple[int, int]:
    low, high = _integers(params, "min_length", "max_length")
    return low, high


def _of_chains(params: Params) -> tuple[int, int]:
    few, many, short, long = _integers(params, "min_terms", "max_terms", "min_digits", "max_digits")
    return few * short, many * long


def _of_expressions(params: Params) -> tuple[int, int]:
    few, many, digits = _integers(params, "min_terms", "max_terms", "max_digits")
    return few, many * digits


def _of_modular_sums(params: Params) -> tuple[int, int]:
    few, many = _integers(params, "min_terms", "max_terms")
    return few, many * len(str(params["max_value"]))


def _of_gcd(params: Params) -> tuple[int, int]:
    return 1, int(params["max_value"])


def _fact_size(prompt: str) -> int:
    relation, _, name = prompt.partition(" of ")
    return len(name) // 2 * len(RELATIONS) + RELATIONS.index(relation)


def _of_facts(params: Params) -> tuple[int, int]:
    short, long, relations = _integers(params, "min_syllables", "max_syllables", "relations")
    return short * len(RELATIONS), long * len(RELATIONS) + relations - 1


WORDS = Measure(lambda prompt: len(prompt.rpartition(" ")[2]), _of_words)
CHAINS = Measure(_digits, _of_chains)
EXPRESSIONS = Measure(_digits, _of_expressions)
MODULAR_SUMS = Measure(_digits, _of_modular_sums)
GCD = Measure(lambda prompt: max(map(int, re.findall(r"[0-9]+", prompt))), _of_gcd)
FACTS = Measure(_fact_size, _of_facts)
