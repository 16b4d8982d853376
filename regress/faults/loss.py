"""Faults in the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import passes
from regress.faults.fault import Shown, fault
from regress.faults.patch import Patch
from regress.grpo import losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.kl import kl_estimate
from regress.grpo.losses import token_loss
from regress.grpo.objective import Objective
from regress.grpo.ratios import importance_ratio


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
    rules=("coefficient",),
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


# @@new
