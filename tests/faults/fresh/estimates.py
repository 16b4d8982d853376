"""Faults of estimates that are made of two log-probs: the divergence, and the sampler's weight of a sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from regress.grpo import losses
from regress.grpo.corrections import sampler_weights
from regress.grpo.kl import kl_estimate
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.rounding import rounded


@fault(
    category="J",
    fresh=True,
    source="verl: an estimator with a plus, whose suffix is stripped",
    cases=("dppo_kl",),
    variants=("base",),
    first="token_gradient token_gradient",
    rules=("kl-gradient-estimator",),
)
def straight_through_of_the_divergence_lost(patch: Patch) -> None:
    """The divergence has the value of k1 as it should, and its gradient, too, in place of that of k2."""
    right: Any = kl_estimate

    def wrong(log_probs: Tensor, reference: Tensor, objective: Any) -> Tensor:
        found: Tensor = right(log_probs, reference, replace(objective, kl_estimator="k1"))
        return found

    patch.setattr(losses, "kl_estimate", wrong)


@fault(
    category="J",
    kind="precision",
    fresh=True,
    source="a fused loss that takes differences of log-probs in half precision",
    variants=("varlen-mbs4",),
    first="kl kl",
    rules=("kl", "precision"),
)
def log_ratio_to_the_reference_in_bfloat16(patch: Patch) -> None:
    """The difference of the log-probs of reference and policy is rounded to half precision before its exponential."""
    right: Any = kl_estimate

    def wrong(log_probs: Tensor, reference: Tensor, objective: Any) -> Tensor:
        gap = rounded((reference - log_probs).detach())
        found: Tensor = right(log_probs, log_probs.detach() + gap, objective)
        return found

    patch.setattr(losses, "kl_estimate", wrong)


@fault(
    category="K",
    fresh=True,
    source="a product over a sample's tokens that context parallelism does not complete",
    cases=("on_policy",),
    variants=("cp2-zigzag-packed-mbs4",),
    first="sampler_weights",
    rules=("sampler-mismatch",),
)
def correction_of_own_columns(patch: Patch) -> None:
    """The sampler's weight of a sample is the product over its tokens on this rank."""
    right: Any = sampler_weights

    def wrong(
        policy: Tensor, sampler: Tensor, sequence: Tensor, count: int, objective: Any, *_: Any
    ) -> Tensor:
        found: Tensor = right(policy, sampler, sequence, count, objective)
        return found

    patch.setattr(losses, "sampler_weights", wrong)
