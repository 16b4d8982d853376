"""Sentences on the layouts that judge a case, and on those that cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from regress.golden.golden_case import GoldenCase
from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import SEMANTICS, Extent, Variant

_NAMED, _CASES = 24, 3
"""Layouts of a case that are named one by one, and cases that are reported one by one."""


def layouts_of(case: GoldenCase, variants: Mapping[str, Variant]) -> str:
    """Return the sentence on the layouts that judge a recorded case by default, in float64."""
    refused: dict[str, str] = {}
    found = replays(
        [case], variants, SEMANTICS, Extent.DEFAULT, lambda one, why: refused.update({one.name: why})
    )
    return _sentence(case.name, [one.variant.name for one in found], _of(case.name, refused), "judge")


def layout_lines(
    chosen: Sequence[Replay], judged: Iterable[str], refused: Mapping[str, str], verb: str = "judged"
) -> list[str]:
    """Return a sentence on each case that was replayed; one on all of them if they are many.

    Args:
        chosen: replays that were to be made.
        judged: names of those that were.
        refused: name -> why one was not possible.
        verb: judge or judged.
    """
    names: dict[str, dict[str, None]] = {one.case.name: {} for one in chosen}
    judged = {*judged}
    for one in chosen:
        if one.name in judged:
            names[one.case.name][one.variant.name] = None
    if len(names) <= _CASES:
        return [_sentence(case, [*own], _of(case, refused), verb) for case, own in names.items()]
    variants = {name for own in names.values() for name in own}
    alone = [case for case, own in names.items() if [*own] == ["base"]]
    poor = f"; by base alone: {', '.join(alone)}" if alone else ""
    left = f"; {len(refused)} could not be (regress replay CASE says why)" if refused else ""
    return [f"layouts that {verb} {len(names)} cases: {len(variants)}{poor}{left}"]


def _of(case: str, refused: Mapping[str, str]) -> dict[str, str]:
    """Return the variants of a case that are not possible, with the reason."""
    return {name.partition("/")[2]: why for name, why in refused.items() if name.partition("/")[0] == case}


def _sentence(case: str, by: Sequence[str], refused: Mapping[str, str], verb: str) -> str:
    more = f" and {len(by) - _NAMED} more (regress replay {case} --list)" if len(by) > _NAMED else ""
    reasons: dict[str, list[str]] = {}
    for name, why in refused.items():
        reasons.setdefault(why.rstrip("."), []).append(name)
    parts = [f"{', '.join(names)} ({why})" for why, names in reasons.items()]
    cannot = f"; not possible: {', '.join(parts)}" if parts else ""
    return f"layouts that {verb} {case}: {', '.join(by[:_NAMED]) or 'none'}{more}{cannot}"
