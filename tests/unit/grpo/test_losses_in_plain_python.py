"""Token losses and their gradients against loops over plain numbers, written from the formulas.

What a formula holds fixed (``sg``) is computed from a second copy of the log-probs, so that a difference quotient by
the first is the derivative that backpropagation has to find.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from regress.grpo.catalogue import REJECTIONS
from regress.grpo.fields import ObjectiveFields
from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.marks import Compared, drawn_by_covariance, greatest_covariances, high_entropy
from regress.grpo.samples import Samples

LENGTHS = [3, 0, 1, 4, 2]
SEQUENCE = [sample for sample, length in enumerate(LENGTHS) for _ in range(length)]
K = len(SEQUENCE)


@dataclass
class Tokens:
    """Numbers of the tokens; advantages are those of samples, of both signs, and 0 for one."""

    seed: int
    new: list[float] = field(init=False)
    old: list[float] = field(init=False)
    ref: list[float] = field(init=False)
    sampler: list[float] = field(init=False)
    entropy: list[float] = field(init=False)
    advantages: list[float] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.new = [-abs(draw.gauss(1.5, 1)) - 0.05 for _ in range(K)]
        self.old = [min(one + draw.gauss(0, 0.4), -0.02) for one in self.new]
        self.ref = [one + draw.gauss(0, 0.4) for one in self.new]
        self.sampler = [one + draw.gauss(0, 0.3) for one in self.old]
        self.entropy = [abs(draw.gauss(1, 0.5)) for _ in range(K)]
        self.advantages = [[1.3, 5.0, -0.7, -1.1, 0.0][sample] for sample in SEQUENCE]


def doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def computed(t: Tokens, **fields: Any) -> tuple[TokenLoss, list[float]]:
    """The loss of each token and the gradient of their weighted sum."""
    new = doubles(t.new).requires_grad_()
    loss = token_loss(
        new,
        doubles(t.old),
        doubles(t.advantages),
        torch.tensor(SEQUENCE),
        len(LENGTHS),
        ObjectiveFields(**fields),
        ref_log_probs_K=doubles(t.ref),
        sampler_log_probs_K=doubles(t.sampler),
        entropy_K=doubles(t.entropy),
    )
    (gradient,) = torch.autograd.grad((loss.loss_K * doubles(WEIGHTS)).sum(), new)
    return loss, gradient.tolist()


WEIGHTS = [1.0 + 0.1 * k for k in range(K)]
Formula = Callable[[list[float], list[float], Tokens, ObjectiveFields], list[float]]
"""Function ``formula(log_probs, held, tokens, objective)``: the loss of each token."""


def agree(t: Tokens, formula: Formula, **fields: Any) -> TokenLoss:
    objective = ObjectiveFields(**fields)
    loss, gradient = computed(t, **fields)
    assert loss.loss_K.tolist() == pytest.approx(formula(t.new, t.new, t, objective), rel=1e-11, abs=1e-13)

    def total(values: list[float]) -> float:
        return math.fsum(w * x for w, x in zip(WEIGHTS, formula(values, t.new, t, objective), strict=True))

    step = 1e-6
    for k in range(K):
        up, down = ([x + s * (j == k) for j, x in enumerate(t.new)] for s in (step, -step))
        assert gradient[k] == pytest.approx((total(up) - total(down)) / (2 * step), rel=1e-5, abs=1e-7)
    return loss


def clip(value: float, low: float | None, high: float | None) -> float:
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def of_samples(values: Sequence[float], average: bool) -> list[float]:
    sums = [math.fsum(v for v, s in zip(values, SEQUENCE, strict=True) if s == own) for own in range(5)]
    return [sums[s] / (LENGTHS[s] if average else 1) for s in SEQUENCE]


def ratios(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    gaps = [p - q for p, q in zip(new, t.old, strict=True)]
    if o.importance_level != "token":
        gaps = of_samples(gaps, o.importance_level == "sequence")
        if o.sequence_gradient == "token":
            fixed = of_samples(
                [p - q for p, q in zip(held, t.old, strict=True)], o.importance_level == "sequence"
            )
            gaps = [p - h + g for p, h, g in zip(new, held, fixed, strict=True)]
    return [math.exp(clip(gap, o.log_ratio_min, o.log_ratio_max)) for gap in gaps]


def of_ratio(rule: Callable[[float, float, ObjectiveFields], float]) -> Formula:
    def formula(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        return [rule(r, a, o) for r, a in zip(ratios(new, held, t, o), t.advantages, strict=True)]

    return formula


def ppo(r: float, a: float, o: ObjectiveFields) -> float:
    first = r if o.delta is None else min(r, o.delta)
    loss = -min(first * a, clip(r, *o.clip_range) * a)
    return min(loss, -o.dual_clip * a) if o.dual_clip is not None and a < 0 else loss


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


def trusted(held: list[float], t: Tokens, o: ObjectiveFields) -> list[bool]:
    result = []
    for log_p, log_q, a in zip(held, t.old, t.advantages, strict=True):
        p, q = math.exp(log_p), math.exp(log_q)
        if o.loss == "dppo_tv":
            result.append(p - q <= o.clip_high if a > 0 else p - q >= -o.clip_low)
            continue
        kl = q * (log_q - log_p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        result.append(kl <= o.clip_high or p <= q if a > 0 else kl <= o.clip_low or p >= q)
    return result


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


def corrections(held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
    """Sampler weights, whose policy is the old one or the current one."""
    policy = held if o.correction_policy == "current" else t.old
    gaps = [0.0 if math.isnan(s) else p - s for p, s in zip(policy, t.sampler, strict=True)]
    level, _, rule = o.sampler_correction.partition("_")
    gaps = of_samples(gaps, False) if level == "sequence" else gaps
    bound = o.correction_log_clamp
    weights = [math.exp(gap if bound is None else clip(gap, -bound, bound)) for gap in gaps]
    low, high = o.correction_min, o.correction_max
    if rule == "truncate":
        weights = [clip(w, low, high) for w in weights]
    else:
        weights = [w if clip(w, low, high) == w else 0.0 for w in weights]
    if not o.correction_normalize:
        return weights
    if level == "token":
        mean = math.fsum(weights) / K
    else:
        mean = (
            math.fsum(w / LENGTHS[s] for w, s in zip(weights, SEQUENCE, strict=True)) / 4
        )  # samples with tokens
    return [w / mean for w in weights]


CLIPS = {"clip_low": 0.15, "clip_high": 0.25}
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


def compared(t: Tokens) -> Compared:
    samples = Samples(torch.tensor(SEQUENCE), len(LENGTHS))
    return Compared(doubles(t.new), doubles(t.old), doubles(t.advantages), samples, doubles(t.entropy))


def covariances(t: Tokens) -> list[float]:
    a, p = math.fsum(t.advantages) / K, math.fsum(t.new) / K
    return [(x - a) * (y - p) for x, y in zip(t.advantages, t.new, strict=True)]


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_are_told_apart_by_covariance(fraction: float, seed: int) -> None:
    t = Tokens(10 + seed)
    cov, count = covariances(t), max(int(fraction * K), 1)
    greatest = sorted(range(K), key=lambda k: -cov[k])[:count]
    fields: dict[str, Any] = {
        "cov_fraction": fraction,
        "cov_low": -0.4,
        "cov_high": 0.5,
        "cov_seed": seed,
        **CLIPS,
    }
    objective = ObjectiveFields(loss="clip_cov", **fields)
    assert greatest_covariances(compared(t), objective).nonzero()[:, 0].tolist() == sorted(greatest)
    free = []
    for k, (p, q, a) in enumerate(zip(t.new, t.old, t.advantages, strict=True)):
        r = math.exp(p - q)
        clipped = -a * clip(r, 0.85, 1.25) > -a * r
        if -0.4 < cov[k] < 0.5 and not clipped:
            free.append(k)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [k for k in order if k in free][:count]
    assert drawn_by_covariance(compared(t), objective).nonzero()[:, 0].tolist() == sorted(drawn)
    loss, _ = computed(t, loss="clip_cov", **fields)
    for k in range(K):
        r, a = math.exp(t.new[k] - t.old[k]), t.advantages[k]
        wanted = 0.0 if k in drawn else -min(r * a, clip(r, 0.85, 1.25) * a)
        assert loss.loss_K[k].item() == pytest.approx(wanted, rel=1e-12, abs=1e-14)

    def kl_cov(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        return [
            -math.exp(p - q) * a + 0.4 * abs(p - q) * (k in greatest)
            for k, (p, q, a) in enumerate(zip(new, t.old, t.advantages, strict=True))
        ]

    agree(t, kl_cov, **{**fields, "loss": "kl_cov", "cov_kl_coef": 0.4})


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_tokens_of_high_entropy(quantile: float) -> None:
    t = Tokens(20)
    ranked = sorted(t.entropy)
    place = (1 - quantile) * (K - 1)
    low, high = ranked[math.floor(place)], ranked[min(math.floor(place) + 1, K - 1)]
    bound = low + (high - low) * (place - math.floor(place))
    kept = [one >= bound - 1e-12 for one in t.entropy]
    objective = ObjectiveFields(top_entropy_quantile=quantile)
    assert high_entropy(doubles(t.entropy), objective).tolist() == kept
    scale = [1.0 + 0.2 * k for k in range(K)]
    loss = token_loss(
        doubles(t.new),
        doubles(t.old),
        doubles(t.advantages),
        torch.tensor(SEQUENCE),
        len(LENGTHS),
        ObjectiveFields(top_entropy_quantile=quantile, entropy_coef=0.2, entropy_aggregation="token-mean"),
        entropy_K=doubles(t.entropy),
        entropy_scale_K=doubles(scale),
    )
    for k in range(K):
        policy = ppo(math.exp(t.new[k] - t.old[k]), t.advantages[k], objective) * kept[k]
        entropy = t.entropy[k] * scale[k] * kept[k] * K / sum(kept)
        assert loss.loss_K[k].item() == pytest.approx(policy - 0.2 * entropy, rel=1e-12, abs=1e-14)
    assert high_entropy(doubles([]), objective).tolist() == []


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
    t, fields = Tokens(22), {"loss": name, "clip_low": 0.01, "clip_high": 0.01}
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


def test_tokens_that_a_draw_leaves_out_keep_their_entropy() -> None:
    t = Tokens(26)
    objective = ObjectiveFields(
        loss="clip_cov", cov_low=-9.0, cov_high=9.0, entropy_coef=0.2, entropy_aggregation="token-mean"
    )
    known = doubles(t.new), doubles(t.old), doubles(t.advantages), torch.tensor(SEQUENCE), len(LENGTHS)
    scale = doubles([1.0 + 0.2 * k for k in range(K)])
    loss = token_loss(*known, objective, entropy_K=doubles(t.entropy), entropy_scale_K=scale)
    assert loss.kept_K is not None
    assert not loss.kept_K.all()
    assert loss.entropy_term_K is not None
    assert loss.entropy_term_K.tolist() == (doubles(t.entropy) * scale).tolist()
