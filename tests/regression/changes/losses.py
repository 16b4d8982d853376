"""Changes of the terms of the loss, of the ratio and of its clip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.grpo import token_losses
from regress.grpo.fields import ObjectiveFields
from regress.replay.fault_injection import Patch
from regress.replay.probes.loss_probes import in_policy_loss
from tests.regression.changes.change import Change, Objective, in_token_loss, with_objective

# terms of the loss


def kl_left_out(patch: Patch) -> None:
    with_objective(patch, kl_coef=0.0)


def kl_counted_thrice(patch: Patch) -> None:
    in_token_loss(
        patch, lambda right, *a, **r: right(*a[:-1], replace(a[-1], kl_coef=3 * a[-1].kl_coef), **r)
    )


def entropy_left_out(patch: Patch) -> None:
    with_objective(patch, entropy_coef=0.0)


def entropy_with_the_kl_coefficient(patch: Patch) -> None:
    """The coefficient of the KL weighs the entropy, and the KL has none."""
    right: Any = token_losses.__dict__["_total"]

    def wrong(policy_K: Tensor, kl_K: Any, entropy_K: Any, objective: Objective) -> Tensor:
        if kl_K is None or entropy_K is None:
            found: Tensor = right(policy_K, kl_K, entropy_K, objective)
            return found
        return policy_K + objective.entropy_coef * kl_K - objective.kl_coef * entropy_K

    patch.setattr(token_losses, "_total", wrong)


def policy_loss_halved_in_the_sum(patch: Patch) -> None:
    right: Any = token_losses.__dict__["_total"]
    patch.setattr(token_losses, "_total", lambda p, *rest: right(0.5 * p, *rest))


def kl_reversed(patch: Patch) -> None:
    right: Any = token_losses.kl_estimate
    patch.setattr(token_losses, "kl_estimate", lambda p, q, o: right(q, p, o))


def kl_squared(patch: Patch) -> None:
    right: Any = token_losses.kl_estimate
    patch.setattr(token_losses, "kl_estimate", lambda p, q, o: right(p, q, replace(o, kl_estimator="k2")))


def kl_clamped(patch: Patch) -> None:
    right: Any = token_losses.kl_estimate
    patch.setattr(token_losses, "kl_estimate", lambda *args: right(*args).clamp(max=0.05))


def kl_times_the_ratio(patch: Patch) -> None:
    with_objective(patch, kl_bias_correction=True)


def reference_in_float16(patch: Patch) -> None:
    right: Any = token_losses.kl_estimate
    patch.setattr(token_losses, "kl_estimate", lambda p, q, o: right(p, q.half().to(q.dtype), o))


# ratio and clip


def ratio_clamped(patch: Patch) -> None:
    with_objective(patch, log_ratio_min=-0.1, log_ratio_max=0.1)


def ratio_of_the_reference(patch: Patch) -> None:
    def wrong(right: Any, log_probs: Tensor, old: Tensor, *args: Any, **rest: Any) -> Any:
        return right(log_probs, rest["ref_log_probs_K"], *args, **rest)

    in_token_loss(patch, wrong)


def ratio_of_one_token_doubled(patch: Patch) -> None:
    right: Any = token_losses.importance_ratio

    def wrong(*args: Any) -> Tensor:
        ratio: Tensor = right(*args)
        factor = torch.ones_like(ratio)
        factor[len(ratio) // 2] = 2.0
        return ratio * factor

    patch.setattr(token_losses, "importance_ratio", wrong)


def upper_bound_tighter(patch: Patch) -> None:
    right: Any = ObjectiveFields.clip_range.fget  # type: ignore[attr-defined]  # a property, read from its class
    patch.setattr(ObjectiveFields, "clip_range", property(lambda o: (right(o)[0], 1 + (right(o)[1] - 1) / 2)))


def lower_bound_off(patch: Patch) -> None:
    right: Any = ObjectiveFields.clip_range.fget  # type: ignore[attr-defined]  # a property, read from its class
    patch.setattr(ObjectiveFields, "clip_range", property(lambda o: (0.0, right(o)[1])))


def negative_advantages_halved(patch: Patch) -> None:
    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        found: Tensor = right(lp, ratio, torch.where(adv < 0, adv / 2, adv), objective)
        return found

    in_policy_loss(patch, wrong)


def advantage_magnitude(patch: Patch) -> None:
    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        found: Tensor = right(lp, ratio, adv.abs(), objective)
        return found

    in_policy_loss(patch, wrong)


def ratio_added_noise(patch: Patch) -> None:
    """Nothing explains this: silence, or the place alone."""

    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        noise = torch.sin(1e3 * lp.detach()) * 0.01
        found: Tensor = right(lp, ratio, adv, objective) + noise
        return found

    in_policy_loss(patch, wrong)


CHANGES = (
    Change(kl_left_out, "dense", ("term-not-computed", "term-left-out")),
    Change(kl_counted_thrice, "dense", ("coefficient",)),
    Change(entropy_left_out, "dr_grpo", ("term-left-out",)),
    Change(entropy_with_the_kl_coefficient, "dense", ("coefficients-exchanged",)),
    Change(policy_loss_halved_in_the_sum, "dense", ("token-loss",)),
    Change(kl_reversed, "dense", ("kl-direction",)),
    Change(kl_squared, "gpt2", ("kl-estimator",)),
    Change(kl_clamped, "dense", ("kl",)),
    Change(kl_times_the_ratio, "dense", ("kl",)),
    Change(reference_in_float16, "dense", ("ratio-dtype", "kl")),
    Change(ratio_clamped, "dense", ("ratio",)),
    Change(ratio_of_the_reference, "dense", ("old-log-probs", "ratio")),
    Change(ratio_of_one_token_doubled, "dense", ("ratio",)),
    Change(upper_bound_tighter, "dense", ("clip-bound", "clip-range")),
    Change(lower_bound_off, "dense", ("clip-range", "clip-bound")),
    Change(negative_advantages_halved, "dense", ("one-sign", "policy-loss")),
    Change(advantage_magnitude, "dr_grpo", ("one-sign", "policy-loss")),
    Change(ratio_added_noise, "dense", ("policy-loss",)),
)
