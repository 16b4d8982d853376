"""Comparison of the rollouts of two dumps, sample by sample, whatever their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import whole_layout
from regress.compare.alignment.token_overlap import Part
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.updates.trajectory_judge import QUANTITY, words_of
from regress.compare.verdicts.tensor_case import Case
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array, dtype_name
from regress.dump.token_provenance import PROVENANCE, Version, stale
from regress.dump.trajectory import Rollout, rollouts_in
from regress.layout import SampleKey, TokenFrame


@dataclass(frozen=True)
class RolloutUnit:
    """The trajectories of one step: names of the records of both sides, and which samples are the same."""

    golden: str
    actual: str
    golden_names: tuple[str, ...]
    actual_names: tuple[str, ...]
    place: Place
    golden_of: Mapping[SampleKey, SampleKey]
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)


def compare_rollouts(unit: RolloutUnit) -> list[Finding]:
    """Compare tokens, masks, rewards and sampler log-probs of the samples that both sides have."""
    golden = _by_key(open_side(unit.golden), unit.golden_names)
    actual = _by_key(open_side(unit.actual), unit.actual_names)
    pairs = [
        (golden[to], actual[key]) for key, to in unit.golden_of.items() if to in golden and key in actual
    ]
    order = {key: index for index, key in enumerate(golden)}
    pairs.sort(key=lambda pair: order[pair[0].key])
    return [finding for finding in _findings(unit, pairs) if unit.only.has(QUANTITY, finding.verdict.name)]


def _by_key(side: Side, names: Iterable[str]) -> dict[SampleKey, Rollout]:
    """Return the rollouts of several records, which ranks may have written; the first of duplicates counts."""
    found: dict[SampleKey, Rollout] = {}
    for name in names:
        for rollout in rollouts_in(side.read(name)):
            found.setdefault(rollout.key, rollout)
    return found


def _findings(unit: RolloutUnit, pairs: list[tuple[Rollout, Rollout]]) -> Iterator[Finding]:
    exact = unit.bounds.of(QUANTITY, [])
    same = [pair for pair in pairs if len(pair[0].tokens) == len(pair[1].tokens)]
    for golden, actual in (pair for pair in pairs if len(pair[0].tokens) != len(pair[1].tokens)):
        words = f"sample {golden.key[0]}/{golden.key[1]}"
        detail = f"{words} has {len(golden.tokens)} golden tokens and {len(actual.tokens)} actual ones"
        yield Finding(Verdict(Status.SHAPE, QUANTITY, "tokens", unit.place, detail), exact)
    if not same:
        return
    frame = TokenFrame(tuple(g.key for g, _ in same), tuple(len(g.tokens) for g, _ in same))
    golden_ids = _joined(g.tokens for g, _ in same)
    locator = Locator(frame, golden_ids)
    for name, tolerance in (
        ("tokens", exact),
        ("loss_mask", exact),
        ("reward", unit.bounds.of("advantages", ["float32"])),
        ("is_val", exact),
    ):
        expected, found = (_values(side, name) for side in zip(*same, strict=True))
        locate = words_of(expected, locator)
        verdict = judge_tensor(
            found, expected, tolerance, quantity=QUANTITY, name=name, place=unit.place, locate=locate
        )
        yield Finding(verdict, tolerance)
    yield from compare_versions(same, unit.place, QUANTITY, exact, locator)
    yield from _log_probs(unit, same, locator)


def _log_probs(unit: RolloutUnit, same: list[tuple[Rollout, Rollout]], locator: Locator) -> Iterator[Finding]:
    """Yield the comparison of sampler log-probs at the sampled tokens, where both sides have them."""
    both = [(g, a) for g, a in same if g.log_probs is not None and a.log_probs is not None]
    if not both:
        return
    frame = TokenFrame(tuple(g.key for g, _ in both), tuple(len(g.tokens) for g, _ in both))
    if len(both) < len(same):
        locator = Locator(frame, _joined(g.tokens for g, _ in both))
    values = [
        _joined(t.log_probs for t in side if t.log_probs is not None) for side in zip(*both, strict=True)
    ]
    mask = _joined(g.loss_mask for g, _ in both).astype(bool)
    tolerance = unit.bounds.of("log_probs", [dtype_name(array.dtype) for array in values])
    golden, actual = (Part(found, np.arange(frame.size), whole_layout(()), found.shape) for found in values)
    rows = TokenRows(actual, [golden], np.flatnonzero(mask))
    case = Case(QUANTITY, "log_probs", unit.place, tolerance, locator.token, actual.shape)
    verdict = judge_aligned(case, Aligned.of_tokens(rows, locator.token))
    note = "" if verdict.ok else of_other_weights(both, values, mask, verdict.tolerance, unit.place)
    yield Finding(verdict, tolerance, note=note)


def _values(rollouts: Sequence[Rollout], name: str) -> Array:
    """Return the values of all samples: those of their tokens, or one for each."""
    if name in ("tokens", "loss_mask"):
        return _joined(getattr(rollout, name) for rollout in rollouts)
    return np.array(
        [getattr(rollout, name) for rollout in rollouts], bool if name == "is_val" else np.float64
    )


def _joined(parts: Iterable[Array]) -> Array:
    """Return the values of all samples in one array, and release mapped files."""
    known = [*parts]
    found = np.concatenate(known)
    for part in known:
        release(part)
    return found


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
