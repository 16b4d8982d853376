"""Faults of one process in the loss of a token: ratios, clips, terms and denominators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.grpo import losses, policy_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.policy_losses import PolicyInputs
from regress.grpo.ratios import importance_ratio
from tests.faults.fault import fault
from tests.faults.patch import Patch

LOSS = "policy_loss policy_loss"
BLIND = ("allclose", "mean 1e-3")


@fault(
    category="K",
    fresh=True,
    source="RLinf#316: a constant that **kwargs swallow",
    cases=("dppo_tv",),
    variants=("base",),
    first=LOSS,
    rules=("clip-range", "clip-left-out", "policy-loss"),
    blind=("mean 1e-3",),
)
def delta_does_not_arrive(patch: Patch) -> None:
    """The weight of a token is the ratio itself, however large: the bound delta is not passed on."""
    right: Any = losses._policy_loss

    def wrong(*args: Any) -> Tensor:
        *first, objective, inputs = args
        return right(*first, replace(objective, delta=None), inputs)

    patch.setattr(losses, "_policy_loss", wrong)


@fault(
    category="K",
    fresh=True,
    source="RLinf#316",
    cases=("trl",),
    variants=("base",),
    first=LOSS,
    rules=("clip-range", "one-sign", "policy-loss"),
    blind=BLIND,
)
def dual_clip_does_not_arrive(patch: Patch) -> None:
    """Losses of disliked tokens have no cap: the dual clip is not passed on."""
    patch.setattr(losses, "_dual_clip", lambda loss, *_: (loss, torch.zeros_like(loss, dtype=torch.bool)))


@fault(
    category="K",
    fresh=True,
    source="verl: a clamp of the negative approximate KL before exp",
    first="ratio prob_ratio",
    rules=("ratio",),
)
def logarithm_of_the_ratio_clamped(patch: Patch) -> None:
    """The logarithm of the ratio is held within 0.1 before it is exponentiated."""
    right: Any = importance_ratio

    def wrong(*args: Any) -> Tensor:
        *first, objective, complete = args
        return right(*first, replace(objective, log_ratio_min=-0.1, log_ratio_max=0.1), complete)

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    fresh=True,
    source="arguments of one type in another order",
    cases=("sapo",),
    variants=("base",),
    first=LOSS,
    rules=("policy-loss",),
    blind=("mean 1e-3",),
)
def temperatures_of_the_signs_exchanged(patch: Patch) -> None:
    """Liked tokens have the temperature of disliked ones, and the reverse."""
    right: Any = policy_losses.sapo

    def wrong(t: PolicyInputs, o: Any) -> Tensor:
        return right(t, replace(o, sapo_tau_pos=o.sapo_tau_neg, sapo_tau_neg=o.sapo_tau_pos))

    patch.setattr(policy_losses, "sapo", wrong)


@fault(
    category="K",
    fresh=True,
    source="MiniMax-M1: only the upper bound is used there",
    cases=("cispo_kl",),
    variants=("base",),
    first=LOSS,
    steps=None,
    rules=("clip-range", "clip-bound", "policy-loss"),
    blind=BLIND,
)
def lower_bound_left_out(patch: Patch) -> None:
    """The weight of a token is bounded from above alone."""

    def wrong(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
        return -t.ratio.clamp(max=o.clip_range[1]).detach() * t.advantages * t.log_probs

    patch.setattr(policy_losses, "cispo", wrong)


@fault(
    category="K",
    fresh=True,
    source="GMPO#4",
    cases=("geo_mean",),
    variants=("base",),
    first=LOSS,
    steps=None,
    rules=("clip-alone", "clip-range", "policy-loss"),
)
def clipped_whatever_the_sign(patch: Patch) -> None:
    """The log-ratio is clipped on both sides, not on the one that the sign of the advantage makes pessimistic."""

    def wrong(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
        clipped = t.log_ratio.clamp(-o.clip_low, o.clip_high)
        return -t.samples.mean(t.advantages) * torch.exp(t.samples.mean(clipped))

    patch.setattr(policy_losses, "geo_mean", wrong)


@fault(
    category="K",
    fresh=True,
    source="a trust region of ratios in place of one of probabilities",
    cases=("dppo_tv",),
    variants=("base",),
    first=LOSS,
    steps=None,
    rules=("policy-loss", "clip-range"),
)
def trust_region_of_the_ratio(patch: Patch) -> None:
    """A token is trusted while its ratio, not its probability, is near."""

    def wrong(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
        gap = t.ratio.detach() - 1.0
        return torch.where(t.advantages > 0, gap <= o.clip_high, gap >= -o.clip_low).to(gap.dtype)

    patch.setattr(policy_losses, "trusted", wrong)


@fault(
    category="K",
    fresh=True,
    source="DeepSeek-V3.2: a mask for negative advantages",
    cases=("cispo_kl",),
    variants=("base",),
    first=LOSS,
    rules=("policy-loss",),
)
def mask_for_the_wrong_sign(patch: Patch) -> None:
    """Samples far from the policy are left out where their advantage is positive, not where it is negative.

    Case dppo_kl, which masks by the same rule, cannot show it in its loss: the correction by sequences gives each
    sample beyond the threshold a weight of 0 already.
    """
    right: Any = losses._on_policy

    def wrong(log_probs: Tensor, given: Any, objective: Any) -> Tensor:
        return right(log_probs, replace(given, advantages=-given.advantages), objective)

    patch.setattr(losses, "_on_policy", wrong)
