"""Faults on the way from rewards to advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import trainer
from regress.grpo import estimators
from regress.grpo.advantages import token_advantages
from regress.grpo.groups import group_statistics
from regress.grpo.objective import Objective
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="I",
    source="unsloth-zoo PR#832",
    first="advantages advantages",
    place="step0/rank0/micro0",
    tokens="of varied groups",
    rules=("deviation-ddof",),
    small=True,
    calibration=True,
    blind=("cosine 0.99", "allclose", "mean 1e-3"),
    silent={"dr_grpo": "nothing is divided by the deviation"},
)
def population_deviation(patch: Patch) -> None:
    """The deviation divides by N in place of N - 1."""
    statistics: Any = group_statistics
    patch.setattr(
        estimators, "group_statistics", lambda rewards, groups, ddof: statistics(rewards, groups, 0)
    )


@fault(
    category="I",
    source="unsloth-zoo PR#832: 1e-4 or 1e-6",
    first="advantages advantages",
    rules=("advantage-epsilon",),
    small=True,
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def deviation_epsilon(patch: Patch) -> None:
    """The deviation that divides an advantage has 1e-4 added to its epsilon."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, sequence: Tensor, objective: Objective, *rest: Any) -> Any:
        return right(rewards, groups, sequence, replace(objective, eps=objective.eps + 1e-4), *rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    source="prime-rl PR#600, R1-V#67",
    first="advantages advantages",
    place="step0/rank0/micro0",
    rules=("advantage-groups",),
    calibration=True,
)
def groups_interleaved(patch: Patch) -> None:
    """Samples of one group lie together, but are grouped as if the groups were interleaved."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Any:
        return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)

    patch.setattr(trainer, "token_advantages", wrong)


def with_objective(patch: Patch, **changed: Any) -> None:
    """Compute advantages by an objective with other fields."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, sequence: Tensor, objective: Objective, *rest: Any) -> Any:
        return right(rewards, groups, sequence, replace(objective, **changed), *rest)

    patch.setattr(trainer, "token_advantages", wrong)


def with_groups(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Compute advantages by other groups."""
    right: Any = token_advantages
    patch.setattr(
        trainer, "token_advantages", lambda rewards, groups, *rest: right(rewards, change(groups), *rest)
    )


@fault(
    category="I",
    source="grpo-flat#2",
    first="advantages advantages",
    rules=("advantage-groups", "advantage-scale", "advantage-offset"),
)
def statistics_of_the_batch(patch: Patch) -> None:
    """The whole batch is one group: its mean is the baseline, and its deviation divides."""
    with_groups(patch, torch.zeros_like)


@fault(
    category="I", source="AReaL#1419, slime#2230", first="advantages advantages", rules=("advantage-groups",)
)
def groups_of_a_fixed_stride(patch: Patch) -> None:
    """Groups are cut every four samples, and have three."""
    with_groups(patch, lambda groups: torch.arange(len(groups)) // 4)


@fault(
    category="I",
    source="axon-rl/gem PR#113",
    first="advantages advantages",
    rules=("advantage-scale", "advantage-groups"),
)
def normalized_twice(patch: Patch) -> None:
    """Advantages are normalized in their group, and once more over the batch."""
    with_objective(patch, normalize_advantages=True)


@fault(
    category="I",
    source="TRL RLOOTrainer in place of GRPOTrainer",
    first="advantages advantages",
    tokens="of varied groups",
    rules=("advantage-scale",),
    blind=("allclose", "mean 1e-3"),
)
def own_reward_not_in_the_baseline(patch: Patch) -> None:
    """The baseline is the mean of the others of the group."""
    with_objective(patch, advantage="rloo")


@fault(category="I", source="unsloth-zoo PR#832", first="advantages advantages", rules=("advantage-scale",))
def deviation_of_the_batch(patch: Patch) -> None:
    """The deviation of all rewards divides, not that of the group."""
    with_objective(patch, scale="batch")


@fault(
    category="I",
    source="Dr. GRPO's estimator under another configuration",
    first="advantages advantages",
    rules=("advantage-scale",),
)
def deviation_left_out(patch: Patch) -> None:
    """Nothing divides the centred rewards."""
    with_objective(patch, scale="none")


@fault(
    category="I",
    source="a baseline minus the reward",
    first="advantages advantages",
    rules=("advantage-sign",),
)
def advantages_reversed(patch: Patch) -> None:
    right: Any = token_advantages
    patch.setattr(trainer, "token_advantages", lambda *args: -right(*args))


@fault(
    category="I",
    source="NeMo-RL PR#2176: a key that no other sample has",
    first="advantages advantages",
    rules=("advantage-offset",),
)
def rewards_not_centred(patch: Patch) -> None:
    """Rewards are divided by the deviation, and their mean is not taken off."""
    patch.setattr(estimators, "_centred", lambda samples: samples.rewards)


@fault(category="I", source="miles PR#1573", first="advantages advantages", rules=("advantage-scale",))
def variance_for_deviation(patch: Patch) -> None:
    """The variance divides, not its root."""
    right: Any = group_statistics

    def wrong(*args: Any) -> Any:
        found = right(*args)
        return replace(found, std=found.std.square())

    patch.setattr(estimators, "group_statistics", wrong)


@fault(
    category="G",
    source="verl#2185, SkyRL PR#2209",
    first="advantages advantages",
    rules=("advantage-groups", "order-not-restored"),
)
def rewards_of_the_next_sample(patch: Patch) -> None:
    """A reordered batch gets the rewards in their old order, one sample off."""
    right: Any = token_advantages
    patch.setattr(trainer, "token_advantages", lambda rewards, *rest: right(rewards.roll(1), *rest))


@fault(
    category="I",
    kind="precision",
    precisions=("float64",),
    source="NeMo-RL PR#4158",
    first="advantages advantages",
    rules=("advantage-epsilon", "advantage-scale"),
)
def variance_by_cancellation(patch: Patch) -> None:
    """The variance is E[x^2] - E[x]^2 in float32, where statistics are float64 in every precision."""
    right: Any = group_statistics

    def wrong(rewards: Tensor, index: Tensor, ddof: int) -> Any:
        found, single = right(rewards, index, ddof), rewards.float()
        mean, square = right(single, index, ddof).mean, right(single.square(), index, ddof).mean
        own = ((square - mean.square()).clamp(min=0) * found.count / (found.count - ddof)).sqrt()
        return replace(found, std=own.double())

    patch.setattr(estimators, "group_statistics", wrong)


@fault(
    category="I",
    kind="precision",
    precisions=("float64",),
    source="a group of equal rewards, whose mean is one rounding off",
    first="advantages advantages",
    cases=("clip_cov",),
    variants=("base",),
    rules=("advantage-of-equal-rewards",),
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def equal_rewards_not_set_to_zero(patch: Patch) -> None:
    """Rounding of equal rewards about their mean is divided by a deviation of 0 and its epsilon, not set to 0."""
    patch.setattr(estimators, "_centred", lambda samples: samples.rewards - samples.group.mean)
