"""The valid names nearest to a mistyped one."""

from collections.abc import Iterable
from difflib import SequenceMatcher

WRONG_SECTION = 2
"""What the right name in a wrong section costs, in edits: more than one typo, less than most."""


def nearest_keys(unknown: str, valid: Iterable[str]) -> list[str]:
    """The valid dotted keys nearest to ``unknown``; several only if they are equally near.

    Nearness counts edits of the full key, so that one wrong character always leads back to the key that was
    meant; a name in the wrong section and initials (``lr`` for ``learning_rate``) are near too. `difflib`
    decides when that leaves more than three.
    """
    distances = {key: _key_distance(unknown, key) for key in valid}
    least = min(distances.values())
    ties = [key for key, distance in distances.items() if distance == least]
    if len(ties) <= 3:
        return ties
    return [max(ties, key=lambda key: SequenceMatcher(None, unknown, key).ratio())]


def nearest(unknown: str, valid: Iterable[str]) -> str:
    """The one valid name nearest to ``unknown``."""
    return max(valid, key=lambda name: (-edits(unknown, name), SequenceMatcher(None, unknown, name).ratio()))


def edits(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbors that turn ``a`` into ``b``."""
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]


def _key_distance(unknown: str, key: str) -> int:
    section, _, name = key.rpartition(".")
    unknown_section, _, unknown_name = unknown.rpartition(".")
    of_name = 1 if unknown_name == _initials(name) else edits(unknown_name, name)
    return min(edits(unknown, key), of_name + min(WRONG_SECTION, edits(unknown_section, section)))


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word)
