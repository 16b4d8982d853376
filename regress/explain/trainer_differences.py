"""Tell two trainers apart by the explanations of the same update of both.

No side needs to be known: each is explained by itself, and only what both explanations settle is set side by side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from regress.compare.dumps.frame_mapping import in_frame
from regress.explain.explanation import explain_update, read_updates
from regress.explain.policy_log_probs import OLD, REFERENCE
from regress.explain.statement import Statement, UpdateExplanation
from regress.explain.update_tokens import UpdateTokens
from regress.layout import SampleKey

SUBJECTS = (
    *("targets", "temperature", "mask", "advantages", "aggregation", "scale", "ratio", "clip"),
    *("kl", "entropy", "detached"),
)
"""Subjects of statements that tell what a loss is, in the order of computation."""
_AT_LEAST, _MOST = 4, 0.75
"""Fewest samples, and least share of them, of which a shift of the mask is reported."""
_SAME = 1e-3
"""Relative difference up to which two solved numbers are the same one."""


def differences(golden: str, actual: str, step: int, update: int | None) -> list[str]:
    """Return a phrase on each subject on which an update of two dumps shows other things.

    Args:
        golden, actual: dumps with token gradients, or golden cases.

    Raises:
        RegressError: if one of them cannot be explained.
    """
    one, two = (next(read_updates(path, step, update)) for path in (golden, actual))
    _complete(one, two)
    _complete(two, one)
    explained = (explain_update(path, side).updates[0] for path, side in ((golden, one), (actual, two)))
    found = [*_phrases(*explained)]
    if not any(phrase.startswith("mask:") for phrase in found):
        found = [*_shifted(_trained(one), _trained(two)), *found]
    return found


def _complete(update: UpdateTokens, other: UpdateTokens) -> None:
    """Give an update old and reference log-probs that its trainer did not record from the other side."""
    for names in (OLD, REFERENCE):
        if update.get(*names) is None and (values := other.get(*names)) is not None:
            update.values[names[-1]] = in_frame(values, other.frame, None, update.frame, np.nan)


def _trained(update: UpdateTokens) -> dict[SampleKey, tuple[int, int]]:
    """Return the first and last token of each sample that has a gradient."""
    gradient = np.nan_to_num(update.values["token_gradient/token_gradient"])
    found: dict[SampleKey, tuple[int, int]] = {}
    for number in np.unique(update.sample[gradient != 0]).tolist():
        at = update.position[(gradient != 0) & (update.sample == number)]
        found[update.frame.samples[number]] = int(at[0]), int(at[-1])
    return found


def _shifted(
    golden: Mapping[SampleKey, tuple[int, int]], actual: Mapping[SampleKey, tuple[int, int]]
) -> Iterator[str]:
    """Yield that samples are trained on from an earlier or later token on, if nearly all of them are."""
    both = [key for key in golden if key in actual]
    moved = Counter(actual[key][0] - golden[key][0] for key in both)
    for by, count in moved.most_common(1):
        if by and len(both) >= _AT_LEAST and count >= _MOST * len(both):
            words = f"{abs(by)} {'token' if abs(by) == 1 else 'tokens'} {'earlier' if by < 0 else 'later'}"
            yield f"mask: training of {count} of {len(both)} samples begins {words} than in the golden dump"


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
    bounds = [side[0].values for side in (ours, theirs) if len(side) == 1 and side[0].subject == "clip"]
    if len(bounds) == 2 and all(_are_intervals(one) for one in bounds):
        return any(_apart(one, other) for one, other in zip(*bounds, strict=True))
    values = [{str(value) for said in side for value in said.values} for side in (ours, theirs)]
    numbers = [[number for said in side for number in _numbers(said)] for side in (ours, theirs)]
    if numbers[0] and numbers[1]:
        near = any(math.isclose(a, b, rel_tol=_SAME) for a in numbers[0] for b in numbers[1])
        return not near or not values[0] & values[1]
    return not values[0] & values[1]


def _are_intervals(values: Sequence[Any]) -> bool:
    """Return True for the intervals that hold the lower and the upper bound; None where one is not known."""
    return len(values) == 2 and all(
        one is None or (isinstance(one, tuple) and len(one) == 2) for one in values
    )


def _apart(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Return True for intervals that no bound can lie in both of."""
    return one is not None and other is not None and (one[1] < other[0] or other[1] < one[0])


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
