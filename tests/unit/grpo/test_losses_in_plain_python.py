"""Token losses and their gradients against loops over plain numbers, written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from regress.grpo.fields import ObjectiveFields
from tests.unit.grpo.plain_losses import (
    CLIPS,
    Formula,
    K,
    Tokens,
    agree,
    clip,
    computed,
    corrections,
    of_ratio,
    of_samples,
    ppo,
    ratios,
    trusted,
)


def sapo(r: float, a: float, o: ObjectiveFields) -> float:
    tau = o.sapo_tau_pos if a > 0 else o.sapo_tau_neg
    return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a


def cispo(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    fixed = ratios(held, held, t, o)
    return [-clip(r, *o.clip_range) * a * p for r, a, p in zip(fixed, t.advantages, new, strict=True)]


def reinforce(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    return [-a * p for a, p in zip(t.advantages, new, strict=True)]


def dro(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    assert o.dro_beta is not None
    beta = o.dro_beta
    return [-p * a + beta / 2 * (p - q) ** 2 for p, q, a in zip(new, t.old, t.advantages, strict=True)]


def geo_mean(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    lesser = []
    for p, q, a in zip(new, t.old, t.advantages, strict=True):
        gap = clip(p - q, -o.clip_low, o.clip_high)
        lesser.append(min(p - q, gap) if a > 0 else max(p - q, gap) if a < 0 else 0.0)
    weight = [1.0] * K
    if o.sampler_correction != "none":
        weight = [
            math.exp(x) for x in of_samples([math.log(w + 1e-10) for w in corrections(held, t, o)], True)
        ]
    means = of_samples(t.advantages, True)
    return [-a * math.exp(x) * w for a, x, w in zip(means, of_samples(lesser, True), weight, strict=True)]


def dppo(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    fixed = [r if o.delta is None else min(r, o.delta) for r in ratios(held, held, t, o)]
    inside = trusted(held, t, o)
    return [-a * r * p * i for a, r, p, i in zip(t.advantages, fixed, new, inside, strict=True)]


def vespo(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    total = of_samples([clip(p - q, -20.0, 20.0) for p, q in zip(held, t.old, strict=True)], False)
    if o.sampler_correction != "none":
        logs = [
            clip(math.log(w), math.log(1e-8), 20.0) if w else math.log(1e-8) for w in corrections(held, t, o)
        ]
        added = of_samples(logs, o.sampler_correction.startswith("sequence"))
        total = [x + y for x, y in zip(total, added, strict=True)]
    result = []
    for x, a, p in zip(total, t.advantages, new, strict=True):
        k, decay = (o.vespo_k_pos, o.vespo_lambda_pos) if a >= 0 else (o.vespo_k_neg, o.vespo_lambda_neg)
        decay, log_w = max(decay, 1e-4), clip(x, math.log(1e-8), 20.0)
        result.append(-math.exp(decay + k * log_w - decay * math.exp(log_w)) * a * p)
    return result


PLAIN: list[tuple[Formula, dict[str, Any]]] = [
    (of_ratio(ppo), {**CLIPS}),
    (of_ratio(ppo), {**CLIPS, "delta": 1.1, "dual_clip": 1.2}),
    (of_ratio(ppo), {"clip_bounds": "absolute", "clip_low": 0.9, "clip_high": 1.05}),
    (of_ratio(ppo), {**CLIPS, "importance_level": "sequence"}),
    (of_ratio(ppo), {**CLIPS, "importance_level": "sequence_product", "sequence_gradient": "token"}),
    (of_ratio(ppo), {**CLIPS, "log_ratio_min": -0.3, "log_ratio_max": 0.2}),
    (of_ratio(ppo), {**CLIPS, "log_ratio_min": -0.1}),
    (of_ratio(ppo), {**CLIPS, "log_ratio_max": 0.1}),
    (of_ratio(lambda r, a, o: -r * a), {"loss": "importance_sampling"}),
    (of_ratio(sapo), {"loss": "sapo", "sapo_tau_pos": 1.25, "sapo_tau_neg": 0.75}),
    (reinforce, {"loss": "reinforce"}),
    (cispo, {"loss": "cispo", **CLIPS}),
    (dro, {"loss": "dro", "dro_beta": 0.7}),
    (geo_mean, {"loss": "geo_mean", **CLIPS}),
    (geo_mean, {"loss": "geo_mean", **CLIPS, "sampler_correction": "token_truncate", "correction_max": 1.1}),
    (dppo, {"loss": "dppo_tv", "clip_low": 0.05, "clip_high": 0.04}),
    (dppo, {"loss": "dppo_kl", "clip_low": 0.002, "clip_high": 0.003, "delta": 1.1}),
    (vespo, {"loss": "vespo"}),
    (vespo, {"loss": "vespo", "vespo_k_neg": 1.125, "vespo_lambda_pos": 0.25, "vespo_lambda_neg": 1e-5}),
    (
        vespo,
        {"loss": "vespo", "vespo_lambda_pos": 0.0, "sampler_correction": "token_mask", "correction_max": 1.2},
    ),
    (vespo, {"loss": "vespo", "sampler_correction": "sequence_truncate", "correction_min": 0.9}),
]


@pytest.mark.parametrize(
    "case", range(len(PLAIN)), ids=lambda n: f"{n}-{PLAIN[n][1].get('loss', 'ppo_clip')}"
)
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_and_their_gradients(case: int, seed: int) -> None:
    formula, fields = PLAIN[case]
    agree(Tokens(seed), formula, **fields)


def kl_of(kind: str, p: float, r: float, log_clamp: float | None, clamp: float | None) -> float:
    x = p - r
    if kind == "k2":
        return x * x / 2
    if kind == "k3":
        y = -x if log_clamp is None else clip(-x, -log_clamp, log_clamp)
        return clip(math.exp(y) - y - 1, None if clamp is None else -clamp, clamp)
    return abs(x) if kind == "abs" else x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("clamps", [(None, None), (0.3, None), (None, 0.02)])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_kl_and_entropy_terms(kind: str, clamps: tuple[float | None, float | None], bias: bool) -> None:
    value, through, _ = kind.partition("+")

    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        result = []
        for k, r in enumerate(ratios(new, held, t, o)):
            kl = kl_of(value, held[k] if through else new[k], t.ref[k], *clamps)
            if through:
                kl += kl_of("k2", new[k], t.ref[k], None, None) - kl_of("k2", held[k], t.ref[k], None, None)
            policy = ppo(r, t.advantages[k], o)
            result.append(policy + 0.3 * kl * (r if bias else 1.0) - 0.2 * t.entropy[k])
        return result

    fields = {"kl_log_ratio_clamp": clamps[0], "kl_clamp": clamps[1], "kl_bias_correction": bias}
    agree(Tokens(7), formula, kl_coef=0.3, entropy_coef=0.2, kl_estimator=kind, **fields)


FLAGS: list[tuple[dict[str, Any], Callable[[float, float], tuple[bool, bool]]]] = [
    ({"loss": loss, **CLIPS}, lambda p, q: (math.exp(p - q) < 0.85, math.exp(p - q) > 1.25))
    for loss in ("ppo_clip", "cispo", "clip_cov")
] + [
    ({"loss": "geo_mean", **CLIPS}, lambda p, q: (not -0.15 <= p - q <= 0.25, not -0.15 <= p - q <= 0.25)),
    ({"loss": "reinforce", **CLIPS}, lambda p, q: (False, False)),
]


@pytest.mark.parametrize("case", range(len(FLAGS)), ids=lambda n: FLAGS[n][0]["loss"])
def test_tokens_that_are_held_back(case: int) -> None:
    t, (fields, rule) = Tokens(24), FLAGS[case]
    loss, _ = computed(t, **fields)
    outside = [rule(p, q) for p, q in zip(t.new, t.old, strict=True)]
    low = [one and a < 0 for (one, _), a in zip(outside, t.advantages, strict=True)]
    high = [one and a > 0 for (_, one), a in zip(outside, t.advantages, strict=True)]
    assert (loss.clipped_low_K.tolist(), loss.clipped_high_K.tolist()) == (low, high)
    assert case == len(FLAGS) - 1 or any(low + high)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_tokens_that_are_not_trusted_are_held_back(name: str) -> None:
    t = Tokens(22)
    fields: dict[str, Any] = {"loss": name, "clip_low": 0.01, "clip_high": 0.01}
    loss, _ = computed(t, **fields)
    away = [not one for one in trusted(t.new, t, ObjectiveFields(**fields))]
    assert loss.clipped_low_K.tolist() == [x and a < 0 for x, a in zip(away, t.advantages, strict=True)]
    assert loss.clipped_high_K.tolist() == [x and a > 0 for x, a in zip(away, t.advantages, strict=True)]
    assert any(away)


def test_a_weight_of_vespo_that_overflows_counts_as_none() -> None:
    t = Tokens(25)
    t.old = [one - 5.0 for one in t.new]
    loss, _ = computed(t, loss="vespo", vespo_k_pos=80.0, vespo_lambda_pos=0.0)
    positive = [a > 0 for a in t.advantages]
    assert [value == 0.0 for value, yes in zip(loss.loss_K.tolist(), positive, strict=True) if yes] == [
        True
    ] * 3


def test_log_ratios_of_vespo_are_clamped_one_by_one() -> None:
    t, gaps = Tokens(25), [25.0, -22.0, 0.0, -30.0, 24.0, -19.0, 1.0, -2.0, 0.5, 0.2]
    t.old = [one - gap for one, gap in zip(t.new, gaps, strict=True)]
    loss, _ = computed(t, loss="vespo")
    wanted = vespo(t.new, t.new, t, ObjectiveFields(loss="vespo"))
    assert loss.loss_K.tolist() == pytest.approx(wanted, rel=1e-11)
    assert all(wanted[k] for k in range(3))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_probabilities_of_almost_one_have_a_distance(sign: float) -> None:
    """The constant beside both probabilities keeps their quotient positive."""
    t = Tokens(25)
    t.advantages = [sign] * K
    if sign > 0:
        t.new, t.old = [-1e-9] * K, t.new
    else:
        t.old = [-1e-9] * K
    fields: dict[str, Any] = {"loss": "dppo_kl", "clip_low": 30.0, "clip_high": 30.0}
    loss, _ = computed(t, **fields)
    assert loss.loss_K.tolist() == pytest.approx(dppo(t.new, t.new, t, ObjectiveFields(**fields)), rel=1e-11)
    assert all(loss.loss_K.tolist())
