"""Derivatives of the terms of a token's loss by its log-prob, as candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regress.explain.mask import Mask
from regress.explain.policies import ON_POLICY, Policies
from regress.explain.update import Floats, Ints

PRODUCT = "the product of the ratios of the sample"
GMPO_BOUNDS = (0.2, 0.4)
"""Bounds of log-ratios that are tried for GMPO: the default of verl 0.9 and that of the paper."""


@dataclass(frozen=True)
class Factor:
    """Factor of a token's advantage in the derivative of the policy term.

    Attributes:
        name: in words.
        values: factor of each token of the frame where nothing is clipped.
        clips: True if tokens may be without the term because their ratio is out of range.
        fields: the fields of an `Objective` that say the same.
        departure: description of a fault, if there is one.
        ratio: the ratio that is compared with the clip range, where the factor is not that ratio itself.
        negative: factor of tokens of negative advantage, where it is another one.
    """

    name: str
    values: Floats
    clips: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    departure: str = ""
    ratio: Floats | None = None
    negative: Floats | None = None

    def of(self, advantages: Floats, tokens: Ints) -> Floats:
        """Return the factor of some tokens that have these advantages."""
        values = self.values[tokens]
        return values if self.negative is None else np.where(advantages < 0, self.negative[tokens], values)

    @property
    def clipped(self) -> Floats:
        """Ratio of each token that is compared with the clip range."""
        return self.values if self.ratio is None else self.ratio


@dataclass(frozen=True)
class Penalty:
    """Derivative of a KL estimate by the token's log-prob, with x = log p - log p_ref and the ratio r."""

    name: str
    values: Floats
    fields: dict[str, Any] = field(default_factory=dict)


def sample_mean(mask: Mask, values: Floats, *, total: bool = False) -> Floats:
    """Return the mean (or sum) over the loss tokens of each token's sample."""
    tokens, sample = mask.effective, mask.update.sample
    sums = np.bincount(sample[tokens], values[tokens], minlength=len(mask.lengths))
    out = sums if total else sums / np.maximum(mask.lengths, 1)
    return np.asarray(out[sample], np.float64)


def factors(mask: Mask, known: Policies) -> list[Factor]:
    """Return every factor that the recorded log-probs allow."""
    ones = np.ones(mask.update.frame.size)
    found = [Factor("1: on policy, or without a ratio", ones)]
    ratio = known.log_ratio()
    if known.on_policy(mask.effective) is False and ratio is not None:
        found += _off_policy(mask, ratio)
    else:
        found.append(_product(mask, np.zeros_like(ones), False))
    if known.own is not None:
        r = 1.0 if ratio is None or known.on_policy(mask.effective) else np.exp(ratio)
        wrong = "the ratio that weighs the log-prob is not detached: its own derivative is added"
        found.append(Factor("r (1 + log p)", r * (1 + known.own), departure=wrong))
    return found


def _off_policy(mask: Mask, ratio: Floats) -> Iterator[Factor]:
    yield Factor("the ratio of the token", np.exp(ratio), True, {"importance_level": "token"})
    mean = np.exp(sample_mean(mask, ratio))
    yield Factor("the mean ratio of the sample", mean, True, {"importance_level": "sequence"})
    yield _product(mask, ratio, True)
    product = np.exp(sample_mean(mask, ratio, total=True))
    yield Factor(f"{PRODUCT}, detached", product, True)
    up, down = (_gate(np.exp(ratio), tau) for tau in (1.0, 1.05))
    yield Factor(
        "SAPO's gate of the ratio, with temperatures 1 and 1.05", up, negative=down, fields={"loss": "sapo"}
    )
    up, down = (_vespo(product, k, decay) for k, decay in ((2.0, 3.0), (3.0, 2.0)))
    words = "VESPO's weight of the sample, with exponents 2 and 3 and decays 3 and 2"
    yield Factor(words, up, negative=down, fields={"loss": "vespo"})
    yield from _geometric(mask, ratio)


def _product(mask: Mask, ratio: Floats, clips: bool) -> Factor:
    """Return the product of a sample's ratios: each of its n tokens moves the loss of all of them."""
    length = np.maximum(mask.lengths, 1)[mask.update.sample]
    product = np.exp(sample_mean(mask, ratio, total=True))
    return Factor(PRODUCT, product * length, clips, {"importance_level": "sequence_product"}, ratio=product)


def _gate(ratio: Floats, tau: float) -> Floats:
    """Return the derivative of SAPO's gate (arXiv 2511.20347) by the log-prob."""
    opened = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return np.asarray(4 * opened * (1 - opened) * ratio, np.float64)


def _vespo(weight: Floats, k: float, decay: float) -> Floats:
    """Return VESPO's weight of a sample whose ratios have this product (arXiv 2602.10693)."""
    bounded = np.clip(weight, 1e-8, np.exp(20.0))
    return np.asarray(np.exp(decay + k * np.log(bounded) - decay * bounded), np.float64)


def _geometric(mask: Mask, ratio: Floats) -> Iterator[Factor]:
    """Yield GMPO's mean ratio (arXiv 2507.20673), whose log-ratios are clipped on the side of the advantage."""
    for bound in GMPO_BOUNDS:
        up = np.exp(sample_mean(mask, np.minimum(ratio, bound)))
        down = np.exp(sample_mean(mask, np.maximum(ratio, -bound)))
        words = f"the mean ratio of the sample, of log-ratios clipped at {bound:g} (GMPO)"
        fields = {"loss": "geo_mean", "clip_low": bound, "clip_high": bound}
        yield Factor(words, up, True, fields, ratio=np.exp(ratio), negative=down)


def penalties(mask: Mask, known: Policies) -> list[Penalty]:
    """Return every KL derivative that the recorded log-probs allow; none without those of a reference."""
    if known.own is None or known.reference is None:
        return []
    x = known.own - known.reference
    found = [Penalty(name, rule(x), {"kl_estimator": name}) for name, rule in _ESTIMATORS.items()]
    found.append(Penalty("the absolute value of k1", np.sign(x)))
    ratio = known.log_ratio()
    if known.on_policy(mask.effective) is not False:
        ratio = np.zeros_like(x)
    if ratio is not None:
        r = np.exp(ratio)
        for name, rule in _ESTIMATORS.items():
            fields = {"kl_estimator": name, "kl_bias_correction": True}
            found.append(Penalty(f"{name} times the ratio", r * (rule(x) + _VALUES[name](x)), fields))
            found.append(Penalty(f"{name} times the detached ratio", r * rule(x)))
    return found


def shifts(penalty: Penalty, factor: Factor, tokens: Ints) -> bool:
    """True if a KL changes the gradients of tokens as one constant that is taken off every advantage."""
    if factor.negative is not None:
        return False
    with np.errstate(all="ignore"):
        quotient = penalty.values[tokens] / factor.values[tokens]
    return bool(np.ptp(quotient) <= ON_POLICY * np.abs(quotient).max())


_ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "k1": np.ones_like,
    "k2": lambda x: x,
    "k3": lambda x: 1 - np.exp(-x),
}
_VALUES: dict[str, Callable[[Floats], Floats]] = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: np.exp(-x) + x - 1,
}
