"""Faults in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import passes
from regress.grpo import losses, policy_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.kl import kl_estimate
from regress.grpo.losses import token_loss
from regress.grpo.objective import Objective
from regress.grpo.policy_losses import PolicyInputs
from regress.grpo.ratios import importance_ratio
from regress.grpo.segments import segment_lengths, segment_sum
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch


@fault(
    category="K",
    source="DAPO's clip_low and clip_high exchanged",
    first="policy_loss policy_loss",
    place="step0/update1/rank0/micro0",
    update=1,
    cases=("dapo",),
    tokens="above or below 0.8 1.2",
    rules=("clip-sides",),
    calibration=True,
    also=(
        Shown(
            "gspo",
            "mbs4",
            "policy_loss policy_loss",
            place="step0/rank0/micro1",
            tokens="above or below 0.9 1.1",
        ),
    ),
    silent={"dense/mbs4": "both sides are 0.2"},
)
def clip_sides_swapped(patch: Patch) -> None:
    patch.setattr(ObjectiveFields, "clip_range", property(lambda o: (1.0 - o.clip_high, 1.0 + o.clip_low)))


@fault(
    category="K",
    source="takuseno/ppo#3",
    first="policy_loss policy_loss",
    place="step0/rank0/micro0",
    tokens="clipped and disliked",
    rules=("minimum-before-advantage",),
    small=True,
    calibration=True,
)
def minimum_before_the_advantage(patch: Patch) -> None:
    """The loss is min(r, clip(r)) A, which is pessimistic for positive advantages only."""

    def wrong(log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective, *_: Any) -> Tensor:
        return -torch.minimum(ratio, ratio.clamp(*objective.clip_range)) * adv

    patch.setattr(losses, "_policy_loss", wrong)


@fault(
    category="J",
    source="open-instruct#534, NeMo-RL PR#2506",
    first="kl kl",
    place="step0/rank0/micro0",
    tokens="all",
    rules=("kl-estimator",),
    small=True,
    calibration=True,
)
def another_estimator(patch: Patch) -> None:
    """k1, whose expected gradient is zero, replaces k3."""
    right: Any = kl_estimate
    patch.setattr(
        losses, "kl_estimate", lambda p, q, objective: right(p, q, replace(objective, kl_estimator="k1"))
    )


@fault(
    category="K",
    source="TRL#5814",
    first="ratio prob_ratio",
    place="step0/rank0/micro0",
    cases=("gspo",),
    tokens="all",
    rules=("ratio-level",),
    calibration=True,
)
def ratio_of_sums(patch: Patch) -> None:
    """The ratio of a sequence is the product over its tokens, not their geometric mean."""
    right: Any = importance_ratio

    def wrong(*args: Any) -> Any:
        *rest, objective, sum_over_context_parallel = args
        return right(
            *rest, replace(objective, importance_level="sequence_product"), sum_over_context_parallel
        )

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    source="old and new log-probs exchanged",
    first="ratio prob_ratio",
    rules=("ratio-inverted",),
    calibration=True,
)
def ratio_inverted(patch: Patch) -> None:
    """The ratio is p_old / p in place of p / p_old."""
    right: Any = importance_ratio
    patch.setattr(losses, "importance_ratio", lambda *args: 1.0 / right(*args))


@fault(
    category="K",
    source="an entropy bonus that is added to the loss",
    first="token_loss elementwise_loss",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    tokens="all",
    rules=("term-left-out",),
    calibration=True,
)
def entropy_bonus_reversed(patch: Patch) -> None:
    right: Any = token_loss

    def wrong(*args: Any, entropy_K: Tensor, **rest: Any) -> Any:
        found = right(*args, entropy_K=-entropy_K, **rest)
        return replace(found, entropy_K=entropy_K.detach())

    patch.setattr(passes, "token_loss", wrong)


@fault(
    category="K",
    source="RLinf#316: a configured constant that does not arrive",
    first="policy_loss policy_loss",
    rules=("clip-range",),
    small=True,
    calibration=True,
)
def clip_range_off(patch: Patch) -> None:
    """The clip range is 0.19 in place of 0.20."""
    right = ObjectiveFields.clip_range.fget  # type: ignore[attr-defined]  # a property, read from its class

    def wrong(objective: Objective) -> tuple[float, float]:
        low, high = right(objective)
        return (1 - (1 - low) * 0.95, 1 + (high - 1) * 0.95)

    patch.setattr(ObjectiveFields, "clip_range", property(wrong))


@fault(
    category="J",
    source="a coefficient that is rounded on its way",
    first="token_loss elementwise_loss",
    rules=("coefficient", "token-loss"),
    small=True,
    calibration=True,
)
def coefficients_off(patch: Patch) -> None:
    """The coefficients of KL and entropy are 1 % too large."""
    right: Any = token_loss

    def wrong(*args: Any, **rest: Any) -> Any:
        *tensors, objective = args
        kl, entropy = objective.kl_coef * 1.01, objective.entropy_coef * 1.01
        return right(*tensors, replace(objective, kl_coef=kl, entropy_coef=entropy), **rest)

    patch.setattr(passes, "token_loss", wrong)


@fault(
    category="K", source="GMPO#4", first="policy_loss policy_loss", rules=("clip-left-out",), calibration=True
)
def ratio_not_clipped(patch: Patch) -> None:
    patch.setattr(ObjectiveFields, "clip_range", property(lambda _: (0.0, 1e9)))


def policy_loss(patch: Patch, change: Callable[[Tensor, Tensor, Tensor, Objective], Tensor]) -> None:
    """Replace the policy loss by ``change(log_probs, ratio, advantages, objective)``."""
    patch.setattr(losses, "_policy_loss", lambda *args: change(*args[:4]))


def kl_with(patch: Patch, **changed: Any) -> None:
    """Estimate the divergence by an objective with other fields."""
    right: Any = kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, o: right(p, q, replace(o, **changed)))


LOSS = "policy_loss policy_loss"


@fault(
    category="J",
    source="KL(reference, policy) in place of KL(policy, reference)",
    first="kl kl",
    tokens="all",
    rules=("kl-direction",),
)
def kl_direction_reversed(patch: Patch) -> None:
    """Policy and reference are exchanged in the divergence."""
    right: Any = kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, objective: right(q, p, objective))


@fault(category="J", source="verl: a clamp of the log-ratio", first="kl kl", rules=("kl",))
def kl_clamped(patch: Patch) -> None:
    """The log-ratio of the divergence is clamped at 0.1."""
    kl_with(patch, kl_log_ratio_clamp=0.1)


@fault(category="J", source="TRL PR#4638", first="kl kl", rules=("kl",))
def kl_times_the_ratio(patch: Patch) -> None:
    """The importance correction of DeepSeek-V3.2, which this objective has not."""
    right: Any = losses._kl
    patch.setattr(
        losses,
        "_kl",
        lambda p, q, ratio, objective: right(p, q, ratio, replace(objective, kl_bias_correction=True)),
    )


@fault(category="J", source="k2 in place of k3", first="kl kl", tokens="all", rules=("kl-estimator",))
def kl_of_the_squared_estimator(patch: Patch) -> None:
    """k2 replaces k3."""
    kl_with(patch, kl_estimator="k2")


@fault(
    category="J",
    source="a coefficient that does not arrive",
    first="token_loss elementwise_loss",
    tokens="all",
    rules=("term-left-out",),
)
def kl_left_out(patch: Patch) -> None:
    """The divergence is computed, and does not enter the loss."""
    right: Any = losses._total
    patch.setattr(losses, "_total", lambda policy, kl, entropy, o: right(policy, None, entropy, o))


@fault(
    category="J",
    source="a divergence that is taken off the loss",
    first="token_loss elementwise_loss",
    tokens="all",
    rules=("term-left-out",),
)
def kl_subtracted(patch: Patch) -> None:
    """The divergence is rewarded."""
    right: Any = losses._total

    def wrong(policy: Tensor, kl: Tensor | None, entropy: Any, objective: Objective) -> Tensor:
        return right(policy, None if kl is None else -kl, entropy, objective)

    patch.setattr(losses, "_total", wrong)


@fault(category="K", source="tianshou#433", first=LOSS, rules=("one-sign", "policy-loss", "clip-range"))
def dual_clip_for_every_sign(patch: Patch) -> None:
    """The loss is capped at 1.1 times the size of the advantage, also where that is positive."""

    def wrong(policy: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        cap = 1.1 * advantages.abs()
        return policy.clamp(-cap, cap), policy.abs() > cap

    patch.setattr(losses, "_dual_clip", wrong)


@fault(
    category="K",
    source="Open-R1: 1 + log r",
    first="ratio prob_ratio",
    tokens="all",
    rules=("ratio-inverted",),
)
def ratio_not_exponentiated(patch: Patch) -> None:
    """The ratio is 1 plus its logarithm."""
    right: Any = importance_ratio
    patch.setattr(losses, "importance_ratio", lambda *args: 1.0 + right(*args).log())


@fault(category="K", source="GMPO#4", first=LOSS, rules=("clip-range",))
def logarithm_clipped(patch: Patch) -> None:
    """The clip range is that of the logarithm of the ratio: exp(0.2) in place of 1.2."""

    def wrong(_: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
        low, high = objective.clip_range
        clipped = ratio.clamp(math.exp(low - 1), math.exp(high - 1))
        return -torch.minimum(ratio * advantages, clipped * advantages)

    policy_loss(patch, wrong)


@fault(
    category="K",
    source="a minimum that became a maximum with the sign of the loss",
    first=LOSS,
    rules=("maximum-for-minimum",),
)
def maximum_for_the_minimum(patch: Patch) -> None:
    """The larger of the two terms is taken."""
    policy_loss(
        patch,
        lambda _, ratio, advantages, o: (
            -torch.maximum(ratio * advantages, ratio.clamp(*o.clip_range) * advantages)
        ),
    )


@fault(category="K", source="a loss without the unclipped term", first=LOSS, rules=("clip-alone",))
def clipped_term_alone(patch: Patch) -> None:
    """The minimum is not taken: the clipped term is the loss."""
    policy_loss(patch, lambda _, ratio, advantages, o: -ratio.clamp(*o.clip_range) * advantages)


@fault(category="A", source="Liger-Kernel#1082, TRL PR#5031", first=LOSS, rules=("loss-without-ratio",))
def ratio_left_out(patch: Patch) -> None:
    """A fused kernel ignores the importance ratio: the loss is the advantage times the log-prob."""
    policy_loss(patch, lambda log_probs, _, advantages, __: -log_probs * advantages)


@fault(category="K", source="a loss that is maximized", first=LOSS, tokens="", rules=("loss-sign",))
def policy_loss_reversed(patch: Patch) -> None:
    """The sign of the policy loss is turned."""
    right: Any = losses._policy_loss
    patch.setattr(losses, "_policy_loss", lambda *args: -right(*args))


@fault(
    category="K",
    source="EasyR1 PR#596, ms-swift PR#6548",
    first="ratio prob_ratio",
    cases=("gspo",),
    rules=("ratio", "ratio-level"),
)
def ratio_over_the_padded_length(patch: Patch) -> None:
    """The mean of a sample's log-ratios divides by the longest completion of the microbatch."""

    def wrong(log_probs: Tensor, old: Tensor, sequence: Tensor, count: int, _: Objective, *__: Any) -> Tensor:
        lengths = segment_lengths(sequence, count)
        total = segment_sum(log_probs - old, sequence, count) / lengths.max().clamp(min=1)
        return torch.exp(total[sequence])

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    source="TRL: token ratios for GSPO",
    first="ratio prob_ratio",
    cases=("gspo",),
    rules=("ratio-level",),
)
def ratio_of_tokens(patch: Patch) -> None:
    """Each token has its own ratio, and the sample should have one."""
    right: Any = importance_ratio
    patch.setattr(
        losses,
        "importance_ratio",
        lambda *args: right(*args[:4], replace(args[4], importance_level="token"), *args[5:]),
    )


# @@new


@fault(
    category="K",
    source="a radius of the trust region that is that of another distance",
    first="metrics training_step/clip_ratio/low",
    cases=("dppo_kl",),
    variants=("base",),
    update=1,
    rules=("mask-of-the-loss",),
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def radius_of_the_trust_region_halved(patch: Patch) -> None:
    """DPPO trusts tokens up to half of its bounds, where the correction of whole samples leaves out those beyond."""
    right: Any = policy_losses.trusted

    def wrong(tokens: PolicyInputs, o: ObjectiveFields) -> Tensor:
        found: Tensor = right(tokens, replace(o, clip_low=o.clip_low / 2, clip_high=o.clip_high / 2))
        return found

    for module in (policy_losses, losses):
        patch.setattr(module, "trusted", wrong)
