"""Sampler weights, rejected tokens and samples that are too far against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_catalogue import REJECTIONS
from regress.grpo.sampler_corrections import TINY, accepted, mean_weight, sampler_weights
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import Compared, normalized_weights
from tests.unit.grpo.plain_losses import (
    LENGTHS,
    SEQUENCE,
    K,
    Tokens,
    agree,
    clip,
    computed,
    corrections,
    doubles,
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


def test_a_mean_of_weights_is_taken_in_double() -> None:
    weights = torch.rand(1001, generator=torch.Generator().manual_seed(1)) + 0.1
    for correction in ("token_mask", "sequence_mask"):
        objective = ObjectiveFields(sampler_correction=correction)
        found = mean_weight(weights, torch.zeros(1001, dtype=torch.long), 1, objective)
        assert found == pytest.approx(math.fsum(weights.tolist()) / 1001, rel=1e-13)


def test_a_mean_as_small_as_its_limit_divides_nothing() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    objective = ObjectiveFields(
        sampler_correction="token_truncate", correction_max=TINY, correction_normalize=True
    )
    assert sampler_weights(old, old, torch.arange(4), 4, objective).tolist() == [TINY] * 4


@pytest.mark.parametrize("policy", ["old", "current"])
def test_weights_of_a_batch_are_those_of_the_policy_that_is_asked_for(policy: str) -> None:
    t = Tokens(8)
    samples = Samples(torch.tensor(SEQUENCE), len(LENGTHS))
    values = doubles(t.new), doubles(t.old), doubles(t.advantages)
    fields: dict[str, Any] = {
        "sampler_correction": "token_truncate",
        "correction_max": 1.1,
        "correction_normalize": True,
        "correction_policy": policy,
    }
    objective = ObjectiveFields(**fields)
    found = normalized_weights(Compared(*values, samples, sampler_log_probs=doubles(t.sampler)), objective)
    assert found.tolist() == pytest.approx(corrections(t.new, t, objective), rel=1e-12)


def test_a_token_meets_every_criterion() -> None:
    policy = doubles([0.0, 0.5, -0.5, 0.0])
    samples = Samples(torch.arange(4), 4)
    for text in ("token_k1:0.9:9,token_k2:0.01", "token_k2:0.01,token_k1:0.9:9"):
        found = accepted(policy, doubles([0.0] * 4), samples, ObjectiveFields(rejection=text))
        assert found.tolist() == [True, False, False, True]


@pytest.mark.parametrize("bounds", ["1:2", "0.5:1"])
def test_a_divergence_that_is_its_bound_is_accepted(bounds: str) -> None:
    tokens = doubles([-0.5, -1.0])
    objective = ObjectiveFields(rejection=f"token_k1:{bounds}")
    assert accepted(tokens, tokens, Samples(torch.arange(2), 2), objective).all()


def test_a_sample_at_the_threshold_is_near_the_policy() -> None:
    t = Tokens(9)
    t.old = list(t.new)
    loss, _ = computed(t, off_policy_threshold=0.0, off_policy_reference="old")
    assert loss.kept_K is not None
    assert loss.kept_K.all()


def test_log_probs_that_the_sampler_does_not_know_are_no_distance() -> None:
    t = Tokens(9)
    t.sampler = [math.nan] * K
    loss, _ = computed(t, off_policy_threshold=0.0, off_policy_reference="sampler")
    assert loss.kept_K is not None
    assert loss.kept_K.all()


@pytest.mark.parametrize("correction", ["token_mask", "sequence_mask"])
def test_the_mean_of_one_weight_is_that_weight_and_of_none_1(correction: str) -> None:
    objective = ObjectiveFields(sampler_correction=correction)
    assert mean_weight(doubles([0.5]), torch.tensor([0]), 1, objective) == 0.5
    assert mean_weight(doubles([]), torch.zeros(0, dtype=torch.long), 2, objective) == 1.0


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


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("against", ["old", "sampler"])
def test_samples_far_from_the_policy(against: str, place: int) -> None:
    t = Tokens(6)
    t.sampler[5] = math.nan
    t.advantages = [[1.3, 5.0, -0.7, -1.1, -0.4][sample] for sample in SEQUENCE]
    other = t.old if against == "old" else t.sampler
    means = of_samples([0.0 if math.isnan(q) else q - p for p, q in zip(t.new, other, strict=True)], True)
    bound = sorted({m for m, a in zip(means, t.advantages, strict=True) if a < 0})[place]
    kept = [m <= bound + 1e-12 or a >= 0 for m, a in zip(means, t.advantages, strict=True)]
    assert 0 < sum(kept) < K

    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        return [x * one for x, one in zip(of_ratio(ppo)(new, held, t, o), kept, strict=True)]

    agree(t, formula, off_policy_threshold=bound + 1e-12, off_policy_reference=against)
