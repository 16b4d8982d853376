"""Random draws that give the same values on every platform and Python version.

Of `random.Random` only the seeding and `random()` are guaranteed never to change, so everything here is
built on these two. No function touches the global generator.
"""

from collections.abc import Iterator
from hashlib import sha512
from random import Random


def generator(*key: object) -> Random:
    """Return a separate generator for the purpose that `key` names, e.g. ``generator("split", seed)``."""
    return Random(":".join(map(str, key)))


def stream_seed(*key: object) -> int:
    """Return the integer of which ``Random(integer)`` draws what ``generator(*key)`` draws.

    It is how `random.Random` takes a text as its seed: the text, followed by its SHA-512, as one number.
    """
    text = ":".join(map(str, key)).encode()
    return int.from_bytes(text + sha512(text).digest(), "big")


def below(rng: Random, bound: int) -> int:
    """Return a uniform integer in [0, bound), for a bound of any size (bias under 2**-64)."""
    value = 0
    for _ in range(bound.bit_length() // 32 + 3):
        value = value << 32 | int(rng.random() * 2**32)
    return value % bound


def distinct(rng: Random, bound: int) -> Iterator[int]:
    """Yield all integers of [0, bound) in random order, lazily, at O(1) memory and time for each one drawn.

    A Fisher-Yates shuffle that stores only the positions it has changed, so bound may be astronomically
    large.
    """
    moved: dict[int, int] = {}
    for start in range(bound):
        other = start + below(rng, bound - start)
        yield moved.get(other, other)
        moved[other] = moved.pop(start, start)
