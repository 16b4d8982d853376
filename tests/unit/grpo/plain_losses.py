"""Numbers of a few tokens, and formulas of their losses as loops over them.

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

from regress.grpo.fields import ObjectiveFields
from regress.grpo.token_losses import TokenLoss, token_loss

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
