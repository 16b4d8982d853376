"""Faults in the backward pass between the loss and the log-probs: every value of the forward pass is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regress.engine import passes
from regress.engine.policy import LocalPolicy
from regress.grpo import losses
from regress.grpo.kl import kl_estimate
from regress.grpo.losses import token_loss
from regress.grpo.objective import Objective
from regress.grpo.ratios import importance_ratio
from regress.grpo.segments import segment_sum
from tests.faults.fault import fault
from tests.faults.patch import Patch


def valued(value: Tensor, gradient: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return value.detach() + (gradient - gradient.detach())


def in_policy_loss(patch: Patch, change: Any) -> None:
    """Replace the policy loss by ``change(right, log_probs, ratio, advantages, objective)``."""
    right: Any = vars(losses)["_policy_loss"]

    def patched(*args: Any) -> Tensor:
        *own, inputs = args
        found: Tensor = change(lambda *these: right(*these, inputs), *own)
        return found

    patch.setattr(losses, "_policy_loss", patched)


@fault(
    category="R",
    source="NeMo-RL PR#2506: a term without gradient",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("kl-detached",),
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def kl_detached(patch: Patch) -> None:
    """The KL term enters the loss under no_grad."""
    right: Any = kl_estimate
    patch.setattr(losses, "kl_estimate", lambda *args: right(*args).detach())


@fault(
    category="R",
    source="slime PR#179",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    cases=("dense", "dr_grpo"),
    rules=("policy-loss-detached", "loss-detached"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def old_log_probs_not_detached(patch: Patch) -> None:
    """Old log-probs carry the same gradient as the new ones, so that the ratio has none."""
    right: Any = importance_ratio
    patch.setattr(losses, "importance_ratio", lambda *args: right(*args).detach())


@fault(
    category="R",
    source="verl: k3+ in place of k3",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("kl-gradient-estimator",),
)
def kl_gradient_of_another_estimator(patch: Patch) -> None:
    """The value of k3 with the gradient of k2."""
    right: Any = kl_estimate

    def wrong(policy: Tensor, reference: Tensor, objective: Objective) -> Tensor:
        value = right(policy, reference, objective)
        return valued(value, 0.5 * (policy - reference).square())

    patch.setattr(losses, "kl_estimate", wrong)


@fault(
    category="R",
    source="a reward with a KL penalty that keeps its graph",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("token-gradient",),
)
def advantages_not_detached(patch: Patch) -> None:
    """Advantages depend on the log-probs, as those of a reward with a KL penalty do."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        loss: Tensor = right(log_probs, ratio, valued(adv, 0.5 * log_probs), objective)
        return loss

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="verl: entropy computed under no_grad",
    first="entropy_gradient entropy_gradient",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    rules=("entropy-detached",),
    calibration=True,
)
def entropy_detached(patch: Patch) -> None:
    right: Any = token_loss

    def wrong(*args: Any, entropy_K: Tensor, **rest: Any) -> Any:
        return right(*args, entropy_K=entropy_K.detach(), **rest)

    patch.setattr(passes, "token_loss", wrong)


@fault(
    category="R",
    source="a clamp kernel whose backward passes all",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("gradient-through-the-clip",),
    calibration=True,
)
def gradient_through_the_clip(patch: Patch) -> None:
    """A clamp passes its gradient through."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        return valued(right(log_probs, ratio, adv, objective), -ratio * adv)

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="GMPO#4",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("clip-stops-too-much",),
)
def gradient_of_the_clipped_term(patch: Patch) -> None:
    """The value is that of the minimum, the gradient that of the clipped term."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        clipped = ratio.clamp(*objective.clip_range)
        return valued(right(log_probs, ratio, adv, objective), -clipped * adv)

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="takuseno/ppo#3",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("clip-gradient-side",),
)
def clip_gradient_on_the_wrong_side(patch: Patch) -> None:
    """The gradient is that of the maximum, not the minimum."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        clipped = ratio.clamp(*objective.clip_range)
        return valued(right(log_probs, ratio, adv, objective), -torch.maximum(ratio * adv, clipped * adv))

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="Liger-Kernel#1082",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    cases=("dense", "dr_grpo"),
    rules=("ratio-not-in-the-gradient",),
)
def ratio_detached(patch: Patch) -> None:
    """The clipped loss has the gradient of the plain policy gradient."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        return valued(right(log_probs, ratio, adv, objective), -log_probs * adv)

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="MiniMax-M1's weight without stop-gradient",
    first="token_gradient token_gradient",
    place="step0/update0/rank0/micro0",
    cases=("cispo",),
    rules=("ratio-not-detached", "sampler-weights-not-detached"),
)
def weight_not_detached(patch: Patch) -> None:
    """The clipped ratio of CISPO, which is a weight, carries a gradient of its own."""

    def wrong(right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        weight: Tensor = ratio.clamp(*objective.clip_range)
        return -weight * adv * log_probs

    in_policy_loss(patch, wrong)


@fault(
    category="R",
    source="EasyR1 PR#596",
    kind="equivalent",
    cases=("gspo",),
    proof="all tokens of a sample have one weight, one advantage and one ratio: the sum over its n tokens of a "
    "gradient of 1 / n through the mean is the gradient of 1 through the own log-prob (GSPO-token, arXiv 2507.18071)",
)
def ratio_gradient_of_each_token(patch: Patch) -> None:
    """The ratio of a sample has a gradient that reaches each token's own log-prob only."""
    right: Any = importance_ratio

    def wrong(log_probs: Tensor, *args: Any) -> Tensor:
        ratio = right(log_probs, *args).detach()
        return valued(ratio, ratio * log_probs)

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="R",
    source="EasyR1 PR#596: a mean whose backward pass is that of a sum",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    cases=("gspo",),
    rules=("ratio-gradient-level",),
)
def ratio_gradient_of_the_sum(patch: Patch) -> None:
    """The ratio of a sample has the gradient of a sum over its tokens, and its value is made of their mean."""
    right: Any = importance_ratio

    def wrong(log_probs: Tensor, old: Tensor, sequence: Tensor, count: int, *rest: Any) -> Tensor:
        ratio = right(log_probs, old, sequence, count, *rest).detach()
        return valued(ratio, ratio * segment_sum(log_probs, sequence, count)[sequence])

    patch.setattr(losses, "importance_ratio", wrong)


def before_backward(patch: Patch, change: Any) -> None:
    """Apply ``change(share, number)`` to the share of each microbatch, by its number within the update."""
    right: Any = LocalPolicy.__dict__["_backward"]
    first: Any = LocalPolicy.__dict__["zero_grad"]
    number = [0]

    def begin(policy: LocalPolicy) -> None:
        number[0] = 0
        first(policy)

    def wrong(policy: LocalPolicy, share: Tensor) -> None:
        right(policy, change(share, number[0]))
        number[0] += 1

    patch.setattr(LocalPolicy, "zero_grad", begin)
    patch.setattr(LocalPolicy, "_backward", wrong)


@fault(
    category="A",
    source="transformers PR#35438, unsloth-zoo PR#1023",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("token-gradient-of-microbatches",),
    calibration=True,
)
def loss_divided_by_microbatches(patch: Patch) -> None:
    """The weights hold the denominator, and the loss is divided by the three microbatches once more."""
    before_backward(patch, lambda share, _: share / 3)


@fault(
    category="O",
    source="a loss scale that is never divided out",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("token-gradient-power-of-two",),
)
def loss_scaled(patch: Patch) -> None:
    """The loss scale is never divided out."""
    before_backward(patch, lambda share, _: share * 1024)


@fault(
    category="R",
    source="a loss that is maximized",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("token-gradient-sign",),
)
def loss_reversed(patch: Patch) -> None:
    before_backward(patch, lambda share, _: -share)


@fault(
    category="A",
    source="transformers PR#34191",
    first="token_gradient token_gradient",
    place="step0/rank0/micro0",
    rules=("token-gradient-denominators",),
)
def denominator_of_the_microbatch_on_the_way_back(patch: Patch) -> None:
    """Each microbatch enters the backward pass with a factor of its own."""
    before_backward(patch, lambda share, number: share * (0.5, 1.25, 2.0)[number])


# @@new
