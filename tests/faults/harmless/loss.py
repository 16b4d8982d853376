"""Refactorings of log-probs, loss and advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regress.engine import passes, policy, trainer
from regress.engine.batch import LossTokens
from regress.grpo import estimators, logprobs, losses, ratios
from regress.grpo.advantages import token_advantages
from regress.grpo.groups import GroupStatistics
from regress.grpo.logprobs import TokenLogProbs, token_log_probs
from regress.grpo.objective import Objective
from regress.grpo.ratios import importance_ratio
from tests.faults.advantages import with_groups
from tests.faults.fault import fault
from tests.faults.loss import policy_loss
from tests.faults.patch import Patch

EVERY = ("float64", "float32", "bfloat16")


def log_probs_by(patch: Patch, compute: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Compute log-probs and entropies by ``compute(logits, targets, temperature)`` of plain torch operations."""

    def other(
        logits: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: Any = False, **_: Any
    ) -> TokenLogProbs:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_p = torch.log_softmax(wide / temperature, -1)
        own = -(log_p.exp() * log_p).sum(-1) if entropy else None
        if own is not None and entropy == "no_grad":
            own = own.detach()
        return TokenLogProbs(compute(wide, targets, temperature), own)

    patch.setattr(policy, "token_log_probs", other)


@fault(category="H", kind="harmless", precisions=EVERY)
def log_probs_by_log_softmax(patch: Patch) -> None:
    """torch.log_softmax over the whole vocabulary, then the targets are picked."""
    log_probs_by(
        patch,
        lambda logits, targets, t: torch.log_softmax(logits / t, -1).gather(-1, targets[..., None])[..., 0],
    )


@fault(category="H", kind="harmless", precisions=EVERY)
def log_probs_by_cross_entropy(patch: Patch) -> None:
    """The negative cross entropy of each token."""
    log_probs_by(
        patch, lambda logits, targets, t: -functional.cross_entropy(logits / t, targets, reduction="none")
    )


@fault(category="H", kind="harmless", cases=("dense", "dr_grpo"), precisions=EVERY)
def log_probs_by_logsumexp(patch: Patch) -> None:
    """The target's logit less the log-sum-exp of all."""

    def compute(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        scaled = logits / temperature
        return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)

    log_probs_by(patch, compute)


@fault(category="H", kind="harmless", cases=("dense", "dr_grpo"), precisions=EVERY)
def vocabulary_in_pieces(patch: Patch) -> None:
    """The log-sum-exp runs over pieces of eight columns."""
    right: Any = token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, **rest: right(*args, **{**rest, "vocab_chunk": 8}))


@fault(category="H", kind="harmless", cases=("dr_grpo",), precisions=EVERY)
def temperature_multiplied(patch: Patch) -> None:
    """Logits are multiplied by the reciprocal of the temperature, in float32 at least."""
    right: Any = token_log_probs

    def multiplied(logits: Tensor, targets: Tensor, *, temperature: float, **rest: Any) -> Any:
        wide = logits.to(
            torch.promote_types(logits.dtype, torch.float32)
        )  # half precision rounds the product
        return right(wide * (1.0 / temperature), targets, **rest)

    patch.setattr(policy, "token_log_probs", multiplied)


@fault(category="R", kind="harmless", precisions=EVERY)
def logits_gradient_by_softmax(patch: Patch) -> None:
    """The gradient of logits is made of one softmax, and a one-hot matrix."""
    right: Any = logprobs.logits_gradient

    def other(logits: Tensor, targets: Tensor, stats: Tensor, up: Tensor, entropy: Any, *rest: Any) -> Tensor:
        if entropy is not None:
            return right(logits, targets, stats, up, entropy, *rest)
        wide = (logits.to(stats.dtype) / rest[0]).reshape(len(targets), -1)
        own = functional.one_hot(targets, wide.shape[-1]).to(wide.dtype) - wide.softmax(-1)
        return (own * (up.reshape(-1, 1).to(wide.dtype) / rest[0])).to(logits.dtype).view_as(logits)

    patch.setattr(logprobs, "logits_gradient", other)


@fault(category="K", kind="harmless", cases=("dense", "gspo"), precisions=EVERY)
def ratio_by_expm1(patch: Patch) -> None:
    """The ratio is 1 + expm1 of its logarithm."""
    right: Any = importance_ratio
    patch.setattr(losses, "importance_ratio", lambda *args: 1.0 + torch.expm1(right(*args).log()))


@fault(category="K", kind="harmless", cases=("dense", "dapo"), precisions=EVERY)
def loss_by_maximum(patch: Patch) -> None:
    """max(-r A, -clip(r) A), as in PPO's first implementation."""
    policy_loss(
        patch,
        lambda _, ratio, advantages, o: torch.maximum(
            -advantages * ratio, -advantages * ratio.clamp(*o.clip_range)
        ),
    )


@fault(category="K", kind="harmless", cases=("dense", "dapo"), precisions=EVERY)
def loss_by_cases(patch: Patch) -> None:
    """The clip is written as two cases, by the sign of the advantage."""

    def other(_: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
        low, high = objective.clip_range
        held = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        return -(held * advantages)

    policy_loss(patch, other)


@fault(category="J", kind="harmless", precisions=EVERY)
def kl_by_expm1(patch: Patch) -> None:
    """k3 as expm1(x) - x."""

    def other(p: Tensor, q: Tensor, _: Objective) -> Tensor:
        gap = q - p
        return torch.expm1(gap) - gap

    patch.setattr(losses, "kl_estimate", other)


@fault(category="J", kind="harmless", precisions=EVERY)
def kl_of_the_ratio(patch: Patch) -> None:
    """k3 as r - log r - 1 of the ratio of reference to policy."""

    def other(p: Tensor, q: Tensor, _: Objective) -> Tensor:
        ratio = torch.exp(q - p)
        return ratio - torch.log(ratio) - 1

    patch.setattr(losses, "kl_estimate", other)


@fault(category="A", kind="harmless", cases=("dense", "dr_grpo"), precisions=EVERY)
def terms_in_another_order(patch: Patch) -> None:
    """Entropy and KL are added up first."""

    def other(policy: Tensor, kl: Tensor | None, entropy: Tensor | None, o: Objective) -> Tensor:
        rest = torch.zeros_like(policy) if kl is None else o.kl_coef * kl
        if o.entropy_coef and entropy is not None:
            rest = rest - o.entropy_coef * entropy
        return rest + policy

    patch.setattr(losses, "_total", other)


@fault(category="A", kind="harmless", precisions=EVERY)
def denominators_by_hand(patch: Patch) -> None:
    """Weights of tokens are made sample by sample."""

    def other(tokens: LossTokens, *_: Any, **__: Any) -> Tensor:
        weights = torch.zeros(len(tokens), dtype=torch.float64)
        for sample in range(tokens.num_sequences):
            here = tokens.sequence == sample
            weights[here] = 1.0 / (tokens.num_sequences * max(int(here.sum()), 1))
        return weights

    patch.setattr(trainer, "weigh", other)


@fault(category="I", kind="harmless", cases=("dense", "dapo"), precisions=EVERY)
def groups_with_other_numbers(patch: Patch) -> None:
    """Groups are numbered otherwise."""
    with_groups(patch, lambda groups: 1000 - 7 * groups)


@fault(category="I", kind="harmless", precisions=EVERY)
def statistics_by_torch(patch: Patch) -> None:
    """Mean and deviation of each group by torch.mean and torch.std."""

    def other(rewards: Tensor, groups: Tensor, ddof: int) -> GroupStatistics:
        mean, std = torch.zeros_like(rewards), torch.zeros_like(rewards)
        count = torch.zeros_like(groups)
        constant = torch.zeros_like(groups, dtype=torch.bool)
        for group in groups.unique():
            here = groups == group
            own = rewards[here]
            mean[here], count[here] = own.mean(), len(own)
            std[here] = own.std(correction=ddof) if len(own) > ddof else 0.0
            constant[here] = bool((own == own[0]).all())
        return GroupStatistics(mean, std, count, constant)

    patch.setattr(estimators, "group_statistics", other)


@fault(category="I", kind="harmless", cases=("dense", "dr_grpo"), precisions=EVERY)
def rewards_shifted_first(patch: Patch) -> None:
    """The mean of all rewards is taken off before groups are looked at."""
    right: Any = token_advantages
    patch.setattr(trainer, "token_advantages", lambda rewards, *rest: right(rewards - rewards.mean(), *rest))


@fault(category="K", kind="harmless", cases=("gspo",), precisions=EVERY)
def sums_of_samples_by_loop(patch: Patch) -> None:
    """Sums over the tokens of a sample are taken sample by sample."""

    def other(values: Tensor, sequence: Tensor, count: int) -> Tensor:
        return torch.stack([values[sequence == sample].sum() for sample in range(count)])

    patch.setattr(ratios, "segment_sum", other)


@fault(category="K", kind="harmless", cases=("cispo",), precisions=EVERY)
def weights_by_division(patch: Patch) -> None:
    """The sampler's weight is a quotient of probabilities."""

    def other(policy: Tensor, sampler: Tensor, *rest: Any) -> Tensor:
        objective = rest[2]
        ratio = policy.detach().exp() / sampler.detach().exp()
        return ratio.clamp(objective.correction_min, objective.correction_max)

    patch.setattr(losses, "sampler_weights", other)


@fault(category="A", kind="harmless", precisions=EVERY)
def loss_as_product(patch: Patch) -> None:
    """A microbatch's share of the loss is a product of vectors."""
    patch.setattr(passes, "_sum", lambda _, values: values @ torch.ones_like(values))
