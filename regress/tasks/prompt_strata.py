"""Numbered sets of a task's prompts, so that distinct ones are drawn without rejection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from regress.tasks.portable_draws import distinct


@dataclass(frozen=True)
class Stratum:
    """Prompts of one kind (say, one word length): `at(index)` for index in [0, size) is (prompt, answer).

    Different indices, and different strata of one task, give different prompts.
    """

    size: int
    at: Callable[[int], tuple[str, str]]


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of draws of each stratum: equal shares; what small strata lack, larger ones add."""
    result = [0] * len(sizes)
    left = min(count, sum(sizes))
    ascending = sorted(range(len(sizes)), key=lambda index: (sizes[index], index))
    for done, index in enumerate(ascending):
        result[index] = min(sizes[index], left // (len(sizes) - done))
        left -= result[index]
    return result


def draw(strata: Sequence[Stratum], count: int, rng: Random) -> list[tuple[str, str]]:
    """Draw `count` (prompt, answer) pairs with distinct prompts in random order; all of them if there are fewer.

    The kinds are mixed evenly: uniform draws from words of 3 to 5 letters would nearly all have 5.
    """
    pairs = []
    for stratum, share in zip(strata, shares([s.size for s in strata], count), strict=True):
        pairs += [stratum.at(index) for index in islice(distinct(rng, stratum.size), share)]
    return [pairs[index] for index in distinct(rng, len(pairs))]
