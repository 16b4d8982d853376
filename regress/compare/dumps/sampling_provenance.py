"""Provenance of sampled tokens on two sides: other weights or another routing, and tokens of stale ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from regress.compare.alignment.element_names import Locator
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.token_provenance import PROVENANCE, Version, stale
from regress.dump.trajectory import Rollout

WEIGHTS, _ = PROVENANCE
Pairs: TypeAlias = Sequence[tuple[Rollout, Rollout]]
"""Golden and actual samples of as many tokens."""


def compare_versions(
    pairs: Pairs, place: Place, quantity: str, exact: Tolerance, locator: Locator
) -> Iterator[Finding]:
    """Yield the comparison of the versions that both sides tell for all samples, with a note on older ones."""
    for name in PROVENANCE:
        sides = _versions(pairs, name)
        if sides is None:
            continue
        golden, actual = sides
        verdict = _judged(name, golden, actual, place, quantity, exact, locator)
        yield Finding(verdict, exact, note=_older(name, actual, pairs, place, locator))


def _judged(
    name: str,
    golden: Sequence[Version],
    actual: Sequence[Version],
    place: Place,
    quantity: str,
    exact: Tolerance,
    locator: Locator,
) -> Verdict:
    codes = {value: code for code, value in enumerate(dict.fromkeys((None, *golden, *actual)))}
    own, theirs = (np.array([codes[value] for value in side], np.int64) for side in (golden, actual))
    verdict = judge_tensor(
        theirs, own, exact, quantity=quantity, name=name, place=place, locate=locator.token
    )
    if verdict.ok:
        return verdict
    other = np.flatnonzero(own != theirs)
    first = int(other[0])
    detail = (
        f"{other.size} tokens, first {locator.token(first)}: golden {golden[first]}, actual {actual[first]}"
    )
    return replace(verdict, detail=detail)


def _older(name: str, values: Sequence[Version], pairs: Pairs, place: Place, locator: Locator) -> str:
    """Return the note on sampled tokens of the actual side that are of older weights; empty without any."""
    sampled = [int(value) for _, actual in pairs for value in actual.loss_mask]
    found = stale(values, sampled)
    if found is None:
        return ""
    count, newest, first = found
    kind = "weights" if name == WEIGHTS else "routing"
    return (
        f"{place}: {count} of {sum(sampled)} sampled tokens have other {name} than the newest, {newest} (stale {kind})"
        f", first {locator.token(first)}: {values[first]}"
    )


def of_other_weights(
    pairs: Pairs, log_probs: Sequence[Array], mask: Array, bound: float, place: Place
) -> str:
    """Return the words for log-probs that differ at tokens of other weights, and nowhere else; empty for others.

    Args:
        log_probs: golden and actual ones of all tokens; those in the ``mask`` count.
        bound: largest difference that is none.
    """
    sides = _versions(pairs, WEIGHTS)
    if sides is None:
        return ""
    golden, actual = (values.astype(np.float64) for values in log_probs)
    over = mask & ~(np.abs(golden - actual) <= bound)
    other = np.array([one != two for one, two in zip(*sides, strict=True)], bool)
    if not over.any() or (over & ~other).any():
        return ""
    return (
        f"{place}: the sampler's log-probs differ at {int(over.sum())} tokens, each of other weights than on the "
        "golden side (weight_versions), and at no other: stale weights"
    )


def _versions(pairs: Pairs, name: str) -> tuple[list[Version], list[Version]] | None:
    """Return golden and actual version of each token; None unless both sides tell them for all samples."""
    golden = [own.versions.get(name) for own, _ in pairs]
    actual = [own.versions.get(name) for _, own in pairs]
    if any(versions is None for versions in (*golden, *actual)):
        return None
    return [v for versions in golden for v in versions or ()], [
        v for versions in actual for v in versions or ()
    ]
