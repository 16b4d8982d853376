"""Weights read from tokens alone: centred advantages of a group sum to 0 only under the right weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from regress.explain.aggregation_weights import AggregationRule, rules
from regress.explain.hypothesis_search import NOISE, TOLERANCE
from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.statement import Statement
from regress.explain.update_tokens import Floats, Ints

GROUPS = 2
"""Least number of groups with a gradient."""
CHANCE = 20.0
"""Multiple of the tolerance by which the sums under all other weights must be off for one rule to count as found."""
EQUAL = 1e-3
"""Relative spread of the norms of groups up to which they count as equal (eps beside a deviation makes some)."""


def centred(mask: Mask, known: Policies) -> Iterator[Statement]:
    """Yield statements on the weights without rewards or advantages, from groups of samples with one prompt."""
    if not mask.complete or known.on_policy(mask.effective) is False:
        return
    groups = _groups(mask)
    tolerance = max(TOLERANCE, NOISE * mask.noise)
    if groups is None:
        return
    found: list[tuple[AggregationRule, Floats]] = []
    others: list[float] = []
    for rule in rules(mask):
        scores = _scores(mask, rule, tolerance)
        if scores is None:
            continue
        off = _imbalance(scores, groups)
        if off <= tolerance:
            found.append((rule, scores))
        else:
            others.append(off)
    if not found or min(others, default=0.0) < CHANCE * tolerance:
        return  # all lengths are alike: every weight would do
    names = tuple(dict.fromkeys(rule.aggregation for rule, _ in found))
    shapes = dict.fromkeys(_shape(rule) for rule, _ in found)
    evidence = {"groups": int(groups.max() + 1), "others are off by at least": min(others)}
    text = f"advantages of a group sum to 0 if the weight of a token is {'; or '.join(shapes)}, and under no other"
    yield Statement("weights", text, names, evidence)
    yield from _scaled(found, groups)


def _groups(mask: Mask) -> Ints | None:
    """Return the group number of each sample, by name, or by the tokens of its prompt; None without groups."""
    update = mask.update
    names: list[object] = [group for group, _ in update.frame.samples]
    ids = update.values.get("batch_inputs/input_ids", update.values.get("forward_data/input_ids"))
    if len(set(names)) == len(names) and ids is not None:
        names = []
        for number in range(len(update.frame.samples)):
            start, stop = update.frame.offsets[number : number + 2]
            live = np.flatnonzero(mask.effective[start:stop])
            names.append(tuple(ids[start : start + live[0]].tolist()) if len(live) else number)
    known = list(dict.fromkeys(names))
    groups = np.array([known.index(name) for name in names], np.int64)
    sizes = np.bincount(groups[mask.speaking], minlength=len(known))
    return groups if (sizes > 1).sum() >= GROUPS else None


def _scores(mask: Mask, rule: AggregationRule, tolerance: float) -> Floats | None:
    """Return -g / weight of each sample, which is its advantage; None where the tokens of a sample disagree."""
    tokens = mask.policy & (mask.update.block >= 0)
    weights = rule.values[tokens]
    if not np.isfinite(weights).all():
        return None
    each = -mask.g[tokens] / weights
    sample = mask.update.sample[tokens]
    size = len(mask.speaking)
    count = np.maximum(np.bincount(sample, minlength=size), 1)
    mean = np.bincount(sample, each, minlength=size) / count
    spread = float(np.sqrt(np.sum((each - mean[sample]) ** 2) / np.sum(each**2)))
    return mean if spread <= tolerance else None


def _imbalance(scores: Floats, groups: Ints) -> float:
    sums = np.bincount(groups, scores)
    return float(np.sqrt(np.sum(sums**2) / np.sum(scores**2)))


def _shape(rule: AggregationRule) -> str:
    return f"in proportion to {rule.words}"


def _scaled(found: list[tuple[AggregationRule, Floats]], groups: Ints) -> Iterator[Statement]:
    """Yield the denominator where the norms of groups show that advantages are divided by the group's deviation."""
    sizes = np.bincount(groups)
    exact = []
    for rule, scores in found:
        norms = np.sqrt(np.bincount(groups, scores**2))
        alive = norms > EQUAL * norms.max()
        if alive.sum() < GROUPS or rule.length == "free":
            continue
        for ddof, name in ((1, "sample"), (0, "population")):
            ratio = norms[alive] / np.sqrt(sizes[alive] - ddof)
            if np.abs(ratio - 1).max() <= EQUAL:
                exact.append((rule, name, float(np.abs(ratio - 1).max())))
    if not exact:
        return
    words = "; or ".join(dict.fromkeys(f"{rule.words} ({kind} deviation)" for rule, kind, _ in exact))
    text = f"advantages are divided by the deviation of their group, and the weight of a token is {words}"
    names = tuple(dict.fromkeys(rule.name for rule, _, _ in exact))
    yield Statement("aggregation", text, names, {"norms off by at most": max(off for _, _, off in exact)})
