"""Sampler weights, rejected tokens and samples that are too far against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from regress.grpo.catalogue import REJECTIONS
from regress.grpo.fields import ObjectiveFields
from tests.unit.grpo.plain_losses import (
    SEQUENCE,
    K,
    Tokens,
    agree,
    clip,
    computed,
    corrections,
    of_ratio,
    of_samples,
    ppo,
)

CORRECTIONS = [
    {
        "sampler_correction": f"{level}_{rule}",
        **bounds,
        "correction_normalize": normalize,
        "correction_policy": policy,
    }
    for level in ("token", "sequence")
    for rule in ("truncate", "mask")
    for bounds in ({"correction_max": 1.1}, {"correction_min": 0.9, "correction_log_clamp": 0.2})
    for normalize, policy in ((False, "old"), (True, "old"), (True, "current"))
]


@pytest.mark.parametrize("fields", CORRECTIONS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_sampler_weights(fields: dict[str, Any]) -> None:
    t = Tokens(3)
    t.sampler[2] = math.nan

    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        losses = of_ratio(ppo)(new, held, t, o)
        return [x * w for x, w in zip(losses, corrections(held, t, o), strict=True)]

    agree(t, formula, **fields)


def test_bounds_of_sampler_weights_belong_to_them() -> None:
    """A weight that is its bound exactly is neither truncated nor masked."""
    t = Tokens(4)
    t.sampler = list(t.old)
    for bounds in ({"correction_min": 1.0}, {"correction_max": 1.0}):
        loss, _ = computed(t, sampler_correction="token_mask", **bounds)
        assert loss.correction_K is not None
        assert loss.correction_K.tolist() == [1.0] * K


def test_weights_that_are_all_masked_are_not_divided_by_their_mean() -> None:
    t = Tokens(4)
    t.sampler = [one - 5.0 for one in t.old]
    loss, _ = computed(t, sampler_correction="token_mask", correction_max=1.0, correction_normalize=True)
    assert loss.correction_K is not None
    assert loss.correction_K.tolist() == [0.0] * K
    assert loss.loss_K.isfinite().all()


def criterion_of(level: str, estimator: str, gaps: list[float]) -> list[float]:
    values = [{"k1": -g, "k2": g * g / 2, "k3": math.exp(g) - 1 - g}[estimator] for g in gaps]
    if level == "token":
        return values
    if level == "seq_max":
        return [max(v for v, s in zip(values, SEQUENCE, strict=True) if s == own) for own in SEQUENCE]
    return of_samples(values, level == "seq_mean")


@pytest.mark.parametrize(("level", "estimator"), [name.rsplit("_", 1) for name in REJECTIONS])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_rejection_by_the_current_policy(level: str, estimator: str, aggregation: str) -> None:
    t, clamp = Tokens(5), 0.5
    gaps = [clip(p - s, -clamp, clamp) for p, s in zip(t.new, t.sampler, strict=True)]
    values = sorted(set(criterion_of(level, estimator, gaps)))
    middle = (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2
    low, high = (values[0] + values[1]) / 2 if estimator == "k1" else -math.inf, middle
    bounds = f"{math.exp(low)}:{math.exp(high)}" if estimator == "k1" else f"{high}"
    if estimator == "k1" and low >= high:
        low = -1e9
        bounds = f"{math.exp(-50)}:{math.exp(high)}"
    kept = [low <= value <= high for value in criterion_of(level, estimator, gaps)]
    assert 0 < sum(kept) < K

    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        losses = of_ratio(ppo)(new, held, t, o)
        share = of_samples([float(one) for one in kept], True) if aggregation.startswith("seq") else [1.0] * K
        return [x / max(n, 1e-8) if one else 0.0 for x, one, n in zip(losses, kept, share, strict=True)]

    fields = {"rejection": f"{level}_{estimator}:{bounds}", "correction_log_clamp": clamp}
    loss = agree(t, formula, aggregation=aggregation, correction_policy="current", **fields)
    assert loss.kept_K is not None
    assert loss.kept_K.tolist() == kept


@pytest.mark.parametrize("against", ["old", "sampler"])
def test_samples_far_from_the_policy(against: str) -> None:
    t = Tokens(6)
    t.sampler[5] = math.nan
    t.advantages = [[1.3, 5.0, -0.7, -1.1, -0.4][sample] for sample in SEQUENCE]
    other = t.old if against == "old" else t.sampler
    means = of_samples([0.0 if math.isnan(q) else q - p for p, q in zip(t.new, other, strict=True)], True)
    bound = sorted({m for m, a in zip(means, t.advantages, strict=True) if a < 0})[1]
    kept = [m <= bound + 1e-12 or a >= 0 for m, a in zip(means, t.advantages, strict=True)]
    assert 0 < sum(kept) < K

    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        return [x * one for x, one in zip(of_ratio(ppo)(new, held, t, o), kept, strict=True)]

    agree(t, formula, off_policy_threshold=bound + 1e-12, off_policy_reference=against)
