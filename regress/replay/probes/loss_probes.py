"""Probes of the loss: advantages, ratios, clips, terms, denominators, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import causal_lm_policy as policy
from regress.engine import grpo_trainer, training_passes
from regress.engine.causal_lm_policy import LocalPolicy
from regress.grpo import token_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective import Objective
from regress.replay.fault_injection import Patch, around, by, in_place_of
from regress.replay.probes import probe


@probe(small=True)
@around(token_losses, "kl_estimate")
def another_estimator(right: Any, p: Any, q: Any, objective: Any) -> Any:
    """k1, whose expected gradient is zero, replaces k3."""
    return right(p, q, replace(objective, kl_estimator="k1"))


@probe(small=True)
@around(ObjectiveFields, "clip_range")
def clip_range_off(right: Any, objective: Objective) -> Any:
    """The clip range is 0.19 in place of 0.20."""
    low, high = right(objective)
    return (1 - (1 - low) * 0.95, 1 + (high - 1) * 0.95)


@probe(small=True)
@around(training_passes, "token_loss")
def coefficients_off(right: Any, *args: Any, **rest: Any) -> Any:
    """The coefficients of KL and entropy are 1 % too large."""
    *tensors, objective = args
    kl, entropy = objective.kl_coef * 1.01, objective.entropy_coef * 1.01
    return right(*tensors, replace(objective, kl_coef=kl, entropy_coef=entropy), **rest)


@probe()
@around(training_passes, "token_loss")
def entropy_bonus_reversed(right: Any, *args: Any, entropy_K: Tensor, **rest: Any) -> Any:
    found = right(*args, entropy_K=-entropy_K, **rest)
    return replace(found, entropy_K=entropy_K.detach())


@probe(small=True)
@in_place_of(token_losses, "_policy_loss")
def minimum_before_the_advantage(
    log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective, *_: Any
) -> Any:
    """The loss is min(r, clip(r)) A, which is pessimistic for positive advantages only."""
    return -torch.minimum(ratio, ratio.clamp(*objective.clip_range)) * adv


@probe()
@around(token_losses, "importance_ratio")
def ratio_of_sums(right: Any, *args: Any) -> Any:
    """The ratio of a sequence is the product over its tokens, not their geometric mean."""
    *rest, objective, sum_over_context_parallel = args
    return right(*rest, replace(objective, importance_level="sequence_product"), sum_over_context_parallel)


@probe(small=True)
@around(grpo_trainer, "token_advantages")
def deviation_epsilon(
    right: Any, rewards: Tensor, groups: Tensor, sequence: Tensor, objective: Objective, *rest: Any
) -> Any:
    """The deviation that divides an advantage has 1e-4 added to its epsilon."""
    return right(rewards, groups, sequence, replace(objective, eps=objective.eps + 1e-4), *rest)


@probe()
@around(grpo_trainer, "token_advantages")
def groups_interleaved(right: Any, rewards: Tensor, groups: Tensor, *args: Any) -> Any:
    """Samples of one group lie together, but are grouped as if the groups were interleaved."""
    return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)


@probe()
@around(training_passes, "token_loss")
def entropy_detached(right: Any, *args: Any, entropy_K: Tensor, **rest: Any) -> Any:
    return right(*args, entropy_K=entropy_K.detach(), **rest)


def in_policy_loss(patch: Patch, change: Any) -> None:
    """Replace the policy loss by ``change(right, log_probs, ratio, advantages, objective)``."""
    right: Any = vars(token_losses)["_policy_loss"]

    def patched(*args: Any) -> Tensor:
        *own, inputs = args
        found: Tensor = change(lambda *these: right(*these, inputs), *own)
        return found

    patch.setattr(token_losses, "_policy_loss", patched)


def valued(value: Tensor, gradient: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return value.detach() + (gradient - gradient.detach())


@probe()
@by(in_policy_loss)
def gradient_through_the_clip(
    right: Any, log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective
) -> Any:
    """A clamp passes its gradient through."""
    return valued(right(log_probs, ratio, adv, objective), -ratio * adv)


@probe()
@around(token_losses, "kl_estimate")
def kl_detached(right: Any, *args: Any) -> Any:
    """The KL term enters the loss under no_grad."""
    return right(*args).detach()


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


@probe()
@by(before_backward)
def loss_divided_by_microbatches(share: Any, _: Any) -> Any:
    """The weights hold the denominator, and the loss is divided by the three microbatches once more."""
    return share / 3


@probe(small=True)
@around(grpo_trainer, "weigh")
def last_token_not_counted(right: Any, *args: Any, **rest: Any) -> Any:
    """The denominator is one token short."""
    weights = right(*args, **rest)
    return weights * (len(weights) / (len(weights) - 1))


@probe(small=True)
@around(policy, "token_log_probs")
def temperature_off(right: Any, *args: Any, temperature: Any, **rest: Any) -> Any:
    """The temperature is 0.79 in place of 0.80."""
    return right(*args, temperature=temperature * 0.79 / 0.80, **rest)
