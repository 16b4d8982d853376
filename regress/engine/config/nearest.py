"""Search for the valid names nearest to a mistyped one."""

from collections.abc import Iterable
from difflib import SequenceMatcher

WRONG_SECTION = 2
ABBREVIATED = 2
"""Cost, in edits, of a name in the wrong section or cut short: more than one typo."""


def nearest_keys(unknown: str, valid: Iterable[str]) -> list[str]:
    """Return the valid dotted keys nearest to ``unknown``; several only if they are equally near.

    Distance counts edits of the full key, so that one wrong character always leads back to the intended key;
    a name in the wrong section and an abbreviation (``lr``, ``grad``) are near, too. `difflib` decides when
    more than three candidates are left that differ by more than one character.
    """
    distances = {key: _key_distance(unknown, key) for key in valid}
    least = min(distances.values())
    ties = [key for key, distance in distances.items() if distance == least]
    if len(ties) <= 3 or least == 1:
        return ties
    return [max(ties, key=lambda key: SequenceMatcher(None, unknown, key).ratio())]


def nearest(unknown: str, valid: Iterable[str]) -> str:
    """Return the one valid name nearest to ``unknown``."""
    return max(
        valid, key=lambda name: (-_distance(unknown, name), SequenceMatcher(None, unknown, name).ratio())
    )


def edits(a: str, b: str) -> int:
    """Count the insertions, deletions, replacements and swaps of neighbors that turn ``a`` into ``b``."""
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
    misplaced = min(WRONG_SECTION, edits(unknown_section, section))
    return min(edits(unknown, key), misplaced + _distance(unknown_name, name))


def _distance(unknown: str, name: str) -> int:
    exact = edits(unknown, name)
    return min(exact, ABBREVIATED) if _abbreviates(unknown, name) else exact


def _abbreviates(short: str, name: str) -> bool:
    initials = "".join(word[0] for word in name.split("_") if word)
    return short == initials or (len(short) > 2 and name.startswith(short))
