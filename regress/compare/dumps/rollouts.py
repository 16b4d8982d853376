"""Comparison of the rollouts of two dumps, sample by sample, whatever their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from regress.compare.alignment.aligned import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.local_shard import whole_layout
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.token_overlap import Part
from regress.compare.dumps.bounds import Bounds
from regress.compare.dumps.findings import Finding
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.sides import Side, open_side
from regress.compare.updates.trajectories import QUANTITY
from regress.compare.verdicts.case import Case, Locate
from regress.compare.verdicts.tensor import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name
from regress.dump.mapped import release
from regress.dump.trajectory import Rollout, rollouts_in
from regress.dump.versions import PROVENANCE, Version, stale
from regress.layout import SampleKey, TokenFrame


@dataclass(frozen=True)
class RolloutUnit:
    """The trajectories of one step: names of the records of both sides, and which samples are the same."""

    golden: str
    actual: str
    records: tuple[tuple[str, ...], tuple[str, ...]]
    place: Place
    golden_of: Mapping[SampleKey, SampleKey]
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)

    @property
    def golden_names(self) -> tuple[str, ...]:
        """The golden records."""
        return self.records[0]

    @property
    def actual_names(self) -> tuple[str, ...]:
        """The actual records."""
        return self.records[1]


def compare_rollouts(unit: RolloutUnit) -> list[Finding]:
    """Compare tokens, masks, rewards and sampler log-probs of the samples that both sides have."""
    golden_side, actual_side = open_side(unit.golden), open_side(unit.actual)
    golden, actual = _by_key(golden_side, unit.records[0]), _by_key(actual_side, unit.records[1])
    pairs = [
        (golden[to], actual[key]) for key, to in unit.golden_of.items() if to in golden and key in actual
    ]
    order = {key: index for index, key in enumerate(golden)}
    pairs.sort(key=lambda pair: order[pair[0].key])
    return [
        finding
        for finding in _findings(unit, pairs, golden_side, actual_side)
        if unit.only.has(QUANTITY, finding.verdict.name)
    ]


def _by_key(side: Side, names: Iterable[str]) -> dict[SampleKey, Rollout]:
    """Return the rollouts of several records, which ranks may have written; the first of duplicates counts."""
    found: dict[SampleKey, Rollout] = {}
    for name in names:
        for rollout in rollouts_in(side.read(name)):
            found.setdefault(rollout.key, rollout)
    return found


def _findings(
    unit: RolloutUnit, pairs: list[tuple[Rollout, Rollout]], golden_side: Side, actual_side: Side
) -> Iterator[Finding]:
    exact = unit.bounds.of(QUANTITY, [])
    same = [pair for pair in pairs if len(pair[0].tokens) == len(pair[1].tokens)]
    for golden, actual in (pair for pair in pairs if len(pair[0].tokens) != len(pair[1].tokens)):
        words = f"sample {golden.key[0]}/{golden.key[1]}"
        detail = f"{words} has {len(golden.tokens)} golden tokens and {len(actual.tokens)} actual ones"
        yield Finding(Verdict(Status.SHAPE, QUANTITY, "tokens", unit.place, detail), exact)
    if not same:
        return
    frame = TokenFrame(tuple(g.key for g, _ in same), tuple(len(g.tokens) for g, _ in same))
    golden_ids, ids = (_joined(t.tokens for t in side) for side in zip(*same, strict=True))
    locator = Locator(frame, golden_ids)
    yield Finding(_judge(unit, "tokens", golden_ids, ids, exact, locator.token), exact)
    del ids
    masks = [_joined(t.loss_mask for t in side) for side in zip(*same, strict=True)]
    yield Finding(_judge(unit, "loss_mask", masks[0], masks[1], exact, locator.token), exact)
    del masks

    def by_sample(index: int) -> str:
        return "sample {}/{}".format(*frame.samples[index])

    rewards = [np.array([t.reward for t in side], np.float64) for side in zip(*same, strict=True)]
    tolerance = unit.bounds.of("advantages", ["float32"])
    yield Finding(_judge(unit, "reward", rewards[0], rewards[1], tolerance, by_sample), tolerance)
    flags = [np.array([t.is_val for t in side]) for side in zip(*same, strict=True)]
    yield Finding(_judge(unit, "is_val", flags[0], flags[1], exact, by_sample), exact)
    yield from _versions(unit, same, locator)
    yield from _log_probs(unit, same, golden_side, actual_side, locator)


def _versions(unit: RolloutUnit, same: list[tuple[Rollout, Rollout]], locator: Locator) -> Iterator[Finding]:
    """Yield the comparison of the weights, and of the routing, that tokens were sampled with; tell older ones."""
    exact = unit.bounds.of(QUANTITY, [])
    for name in PROVENANCE:
        sides = [[t.versions.get(name) for t in side] for side in zip(*same, strict=True)]
        known = [all(versions is not None for versions in side) for side in sides]
        values = [[v for versions in side for v in versions or ()] for side in sides]
        if not all(known):
            continue
        codes = {value: code for code, value in enumerate(dict.fromkeys((None, *values[0], *values[1])))}
        own, theirs = (np.array([codes[value] for value in side], np.int64) for side in values)
        verdict = _judge(unit, name, own, theirs, exact, locator.token)
        if not verdict.ok:
            first = int(np.flatnonzero(own != theirs)[0])
            detail = f"{int((own != theirs).sum())} tokens, first {locator.token(first)}: golden {values[0][first]}, "
            verdict = replace(verdict, detail=f"{detail}actual {values[1][first]}")
        yield Finding(verdict, exact, note=_older(unit, name, values[1], same, locator))


def _older(
    unit: RolloutUnit,
    name: str,
    values: list[Version],
    same: list[tuple[Rollout, Rollout]],
    locator: Locator,
) -> str:
    """Return what is told of sampled tokens of the actual side that are of older weights; empty without any."""
    sampled = _joined(t.loss_mask for _, t in same).tolist()
    found = stale(values, sampled)
    if found is None:
        return ""
    count, newest, first = found
    return (
        f"{unit.place}: {count} of {sum(sampled)} sampled tokens have other {name} than the newest, {newest} (stale "
        f"{'weights' if name == PROVENANCE[0] else 'routing'}), first {locator.token(first)}: {values[first]}"
    )


def _log_probs(
    unit: RolloutUnit,
    same: list[tuple[Rollout, Rollout]],
    golden_side: Side,
    actual_side: Side,
    locator: Locator,
) -> Iterator[Finding]:
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
    note = "" if verdict.ok else _of_other_weights(unit, both, values, mask, verdict.tolerance)
    yield Finding(verdict, tolerance, note=note)


def _of_other_weights(
    unit: RolloutUnit,
    both: list[tuple[Rollout, Rollout]],
    values: list[Array],
    mask: Array,
    bound: float,
) -> str:
    """Return the words for log-probs that differ at tokens of other weights, and nowhere else; empty for others."""
    name = PROVENANCE[0]
    sides = [[t.versions.get(name) for t in side] for side in zip(*both, strict=True)]
    if any(versions is None for side in sides for versions in side):
        return ""
    own, theirs = ([v for versions in side for v in versions or ()] for side in sides)
    over = mask & ~(np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)) <= bound)
    other = np.array([a != b for a, b in zip(own, theirs, strict=True)], bool)
    if not over.any() or (over & ~other).any():
        return ""
    return (
        f"{unit.place}: the sampler's log-probs differ at {int(over.sum())} tokens, each of other weights than on the "
        "golden side (weight_versions), and at no other: stale weights"
    )


def _joined(parts: Iterable[Array]) -> Array:
    """Return the values of all samples in one array, and release mapped files."""
    known = [*parts]
    found = np.concatenate(known)
    for part in known:
        release(part)
    return found


def _judge(
    unit: RolloutUnit, name: str, golden: Array, actual: Array, tolerance: Tolerance, locate: Locate
) -> Verdict:
    return judge_tensor(
        actual, golden, tolerance, quantity=QUANTITY, name=name, place=unit.place, locate=locate
    )
