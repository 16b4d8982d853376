"""Derivatives of the terms of a token's loss by its log-prob, as candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import ON_POLICY, Policies
from regress.explain.update_tokens import Floats, Ints

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
        weight: recorded weight of each token for the sampler, where the policy term is multiplied by it.
    """

    name: str
    values: Floats
    clips: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    departure: str = ""
    ratio: Floats | None = None
    negative: Floats | None = None
    weight: Floats | None = None

    def of(self, advantages: Floats, tokens: Ints) -> Floats:
        """Return the factor of some tokens that have these advantages."""
        values = self.values[tokens]
        return values if self.negative is None else np.where(advantages < 0, self.negative[tokens], values)

    def weighed(self, values: Floats, tokens: Ints) -> Floats:
        """Return values of some tokens times their weights for the sampler, if they have any."""
        return values if self.weight is None else values * self.weight[tokens]

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


def factors(mask: Mask, known: Policies) -> list[Factor]:
    """Return every factor that a loss of the catalogue has, as far as the recorded log-probs tell it."""
    ones = np.ones(mask.update.frame.size)
    found = [Factor("1: on policy, or without a ratio", ones)]
    ratio = known.log_ratio()
    off = known.on_policy(mask.effective) is False and ratio is not None
    base = ratio if off and ratio is not None else np.zeros_like(ones)
    for words, fields in _losses() if off else [(PRODUCT, _PRODUCT)]:
        up, ratios = _derivative(mask, base, fields, 1.0)
        down, _ = _derivative(mask, base, fields, -1.0)
        one_sided = np.allclose(up, down, rtol=1e-12, atol=0)
        clips = off and fields.get("loss", "ppo_clip") in ("ppo_clip", "geo_mean")
        changed = {} if fields.items() >= _DETACHED.items() else fields
        found.append(Factor(words, up, clips, changed, ratio=ratios, negative=None if one_sided else down))
    if known.own is not None:
        r = 1.0 if ratio is None or not off else np.exp(ratio)
        wrong = "the ratio that weighs the log-prob is not detached: its own derivative is added"
        found.append(Factor("r (1 + log p)", r * (1 + known.own), departure=wrong))
    weight = mask.update.get("is_loss_debug/sampler_weights")
    if weight is None or not np.isfinite(weight[mask.effective]).all() or (weight[mask.effective] == 1).all():
        return found
    weighed = [
        replace(one, name=f"{one.name}, times the weight for the sampler", weight=weight) for one in found
    ]
    return [*weighed, *found]


def _losses() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield losses whose derivative is the advantage times a factor, in words and as fields of the objective."""
    yield "the ratio of the token", {"importance_level": "token"}
    yield "the mean ratio of the sample", {"importance_level": "sequence"}
    yield PRODUCT, _PRODUCT
    yield f"{PRODUCT}, detached", _PRODUCT | _DETACHED
    yield "SAPO's gate of the ratio, with temperatures 1 and 1.05", {"loss": "sapo"}
    yield "VESPO's weight of the sample, with exponents 2 and 3 and decays 3 and 2", {"loss": "vespo"}
    for bound in GMPO_BOUNDS:
        words = f"the mean ratio of the sample, of log-ratios clipped at {bound:g} (GMPO)"
        yield words, {"loss": "geo_mean", "clip_low": bound, "clip_high": bound}


_PRODUCT = {"importance_level": "sequence_product"}
_DETACHED = {"sequence_gradient": "token"}
_UNCLIPPED = {"clip_low": np.inf, "clip_high": np.inf}


def _derivative(
    mask: Mask, log_ratio: Floats, fields: dict[str, Any], advantage: float
) -> tuple[Floats, Floats]:
    """Return minus the derivative of a loss over the advantage, and the ratio, ``[frame.size]`` each."""
    import torch

    from regress.grpo.fields import ObjectiveFields
    from regress.grpo.objective_evaluation import Samples, gradients_of, loss_of

    tokens = np.flatnonzero(mask.effective)
    own = torch.from_numpy(log_ratio[tokens])
    ones = torch.ones_like(own)
    values = {"log_probs": own, "old_log_probs": 0 * own, "advantages": advantage * ones, "weights": ones}
    samples = Samples(torch.from_numpy(mask.update.sample[tokens].astype(np.int64)), len(mask.lengths))
    objective = ObjectiveFields(**{**_UNCLIPPED, **fields})
    slope, out = np.ones(log_ratio.size), np.ones(log_ratio.size)
    slope[tokens] = -gradients_of(values, samples, objective)["token_gradient"].numpy() / advantage
    out[tokens] = loss_of(values, samples, objective)["ratio"].numpy()
    return slope, np.exp(log_ratio) if fields.get("loss") == "geo_mean" else out


def penalties(mask: Mask, known: Policies) -> list[Penalty]:
    """Return the derivative of every KL estimate by the token's log-prob; none without a reference."""
    if known.own is None or known.reference is None:
        return []
    x = known.own - known.reference
    ratio = np.zeros_like(x) if known.on_policy(mask.effective) is not False else known.log_ratio()
    slopes = {name: _kl_slope(x, 0 * x, {"kl_estimator": name}) for name in ("k1", "k2", "k3", "abs")}
    absolute = Penalty("the absolute value of k1", slopes.pop("abs"))
    found = [*(Penalty(name, slope, {"kl_estimator": name}) for name, slope in slopes.items()), absolute]
    if ratio is None:
        return found
    for name, slope in slopes.items():
        fields = {"kl_estimator": name, "kl_bias_correction": True}
        found.append(Penalty(f"{name} times the ratio", _kl_slope(x, ratio, fields), fields))
        found.append(Penalty(f"{name} times the detached ratio", np.exp(ratio) * slope))
    return found


def _kl_slope(x: Floats, ratio: Floats, fields: dict[str, Any]) -> Floats:
    """Return d KL / d log p where log p - log p_ref is x, and log p - log p_old the log-ratio."""
    import torch

    from regress.grpo.fields import ObjectiveFields
    from regress.grpo.objective_evaluation import Samples, gradients_of

    at = np.flatnonzero(np.isfinite(x) & np.isfinite(ratio))
    own = torch.from_numpy(x[at])
    values = {"log_probs": own, "ref_log_probs": 0 * own, "old_log_probs": own - torch.from_numpy(ratio[at])}
    values |= {"advantages": 0 * own, "weights": 0 * own + 1}
    objective = ObjectiveFields(kl_coef=1.0, **fields)
    samples = Samples(torch.arange(len(at)), len(at))
    out = np.full(x.shape, np.nan)
    out[at] = gradients_of(values, samples, objective)["token_gradient"].numpy()
    return out


def shifts(penalty: Penalty, factor: Factor, tokens: Ints) -> bool:
    """Return True if a KL changes the gradients of tokens as one constant that is taken off every advantage."""
    if factor.negative is not None:
        return False
    with np.errstate(all="ignore"):
        quotient = penalty.values[tokens] / factor.weighed(factor.values[tokens], tokens)
    return bool(np.ptp(quotient) <= ON_POLICY * np.abs(quotient).max())
