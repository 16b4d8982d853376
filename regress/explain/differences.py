"""Tell two trainers apart by the explanations of the same update of both.

No side needs to be known: each is explained by itself, and only what both explanations settle is set side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from regress.explain.explain import explain_dump
from regress.explain.statement import Statement, UpdateExplanation

SUBJECTS = (
    *("targets", "temperature", "mask", "advantages", "aggregation", "scale", "ratio", "clip"),
    *("kl", "entropy", "detached"),
)
"""Subjects of statements that tell what a loss is, in the order of computation."""
_SAME = 1e-3
"""Relative difference up to which two solved numbers are the same one."""


def differences(golden: str, actual: str, step: int, update: int | None) -> list[str]:
    """Return a phrase on each subject on which an update of two dumps shows other things.

    Args:
        golden, actual: dumps with token gradients, or golden cases.

    Raises:
        RegressError: if one of them cannot be explained.
    """
    one, two = (explain_dump(path, step=step, update=update).updates[0] for path in (golden, actual))
    return [*_phrases(one, two)]


def _phrases(golden: UpdateExplanation, actual: UpdateExplanation) -> Iterator[str]:
    for subject in SUBJECTS:
        ours, theirs = (
            [said for said in side.statements if said.subject == subject] for side in (golden, actual)
        )
        if ours and theirs and _differ(ours, theirs):
            yield f"{subject}: {_words(theirs)}, where the golden dump has: {_words(ours)}"
        elif not ours and subject not in golden.undetermined and any(said.departure for said in theirs):
            yield f"{subject}: {_words(theirs)}, and none of it in the golden dump"


def _differ(ours: list[Statement], theirs: list[Statement]) -> bool:
    """Return True if no reading fits both sides, or what it solves for is another number."""
    if [said.text for said in ours] == [said.text for said in theirs]:
        return False
    values = [{str(value) for said in side for value in said.values} for side in (ours, theirs)]
    numbers = [[number for said in side for number in _numbers(said)] for side in (ours, theirs)]
    if numbers[0] and numbers[1]:
        near = any(math.isclose(a, b, rel_tol=_SAME) for a in numbers[0] for b in numbers[1])
        return not near or not values[0] & values[1]
    return not values[0] & values[1]


def _numbers(said: Statement) -> Iterator[float]:
    """Yield the numbers that a statement solves for: a temperature, coefficients."""
    found = said.evidence.get("coefficient", ())
    found = found if isinstance(found, list | tuple) else [found]
    for value in (*said.values, *found):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)


def _words(said: list[Statement]) -> str:
    """Return the sentences of a side, without readings that are the same here."""
    return ", ".join(one.text.partition("; or ")[0] for one in said)
