"""Faults on the way from rewards to advantages."""

from dataclasses import replace

import torch

from regress.engine import grpo_trainer
from regress.grpo import advantage_estimators
from regress.grpo.advantage_computation import token_advantages
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.loss_probes import deviation_epsilon, groups_interleaved
from tests.faults.fault import EVERY_CHECK, LOG_PROB_CHECKS, fault, met_in


@fault(
    "I",
    "advantages advantages",
    "deviation-ddof",
    place="step0/rank0/micro0",
    tokens="of varied groups",
    silent={"dr_grpo": "nothing is divided by the deviation"},
    blind=("cosine 0.99", "allclose", "mean 1e-3"),
)
@met_in("unsloth-zoo PR#832")
@around(advantage_estimators, "group_statistics")
def population_deviation(statistics, rewards, groups, ddof):
    """The deviation divides by N in place of N - 1."""
    return statistics(rewards, groups, 0)


fault("I", "advantages advantages", "advantage-epsilon", blind=EVERY_CHECK)(
    met_in("unsloth-zoo PR#832: 1e-4 or 1e-6")(deviation_epsilon)
)

fault("I", "advantages advantages", "advantage-groups", place="step0/rank0/micro0")(
    met_in("prime-rl PR#600, R1-V#67")(groups_interleaved)
)


def with_objective(patch, **changed):
    """Compute advantages by an objective with other fields."""
    right = token_advantages

    def wrong(rewards, groups, sequence, objective, *rest):
        return right(rewards, groups, sequence, replace(objective, **changed), *rest)

    patch.setattr(grpo_trainer, "token_advantages", wrong)


def with_groups(patch, change):
    """Compute advantages by other groups."""
    right = token_advantages
    patch.setattr(
        grpo_trainer, "token_advantages", lambda rewards, groups, *rest: right(rewards, change(groups), *rest)
    )


@fault("I", "advantages advantages", "advantage-groups advantage-scale advantage-offset")
@met_in("grpo-flat#2")
def statistics_of_the_batch(patch):
    """The whole batch is one group: its mean is the baseline, and its deviation divides."""
    with_groups(patch, torch.zeros_like)


@fault("I", "advantages advantages", "advantage-groups")
@met_in("AReaL#1419, slime#2230")
@by(with_groups)
def groups_of_a_fixed_stride(groups):
    """Groups are cut every four samples, and have three."""
    return torch.arange(len(groups)) // 4


@fault("I", "advantages advantages", "advantage-scale advantage-groups")
@met_in("axon-rl/gem PR#113")
def normalized_twice(patch):
    """Advantages are normalized in their group, and once more over the batch."""
    with_objective(patch, normalize_advantages=True)


@fault("I", "advantages advantages", "advantage-scale", tokens="of varied groups", blind=LOG_PROB_CHECKS)
@met_in("TRL RLOOTrainer in place of GRPOTrainer")
def own_reward_not_in_the_baseline(patch):
    """The baseline is the mean of the others of the group."""
    with_objective(patch, advantage="rloo")


@fault("I", "advantages advantages", "advantage-scale")
@met_in("unsloth-zoo PR#832")
def deviation_of_the_batch(patch):
    """The deviation of all rewards divides, not that of the group."""
    with_objective(patch, scale="batch")


@fault("I", "advantages advantages", "advantage-scale")
@met_in("Dr. GRPO's estimator under another configuration")
def deviation_left_out(patch):
    """Nothing divides the centred rewards."""
    with_objective(patch, scale="none")


@fault("I", "advantages advantages", "advantage-sign")
@met_in("a baseline minus the reward")
@around(grpo_trainer, "token_advantages")
def advantages_reversed(right, *args):
    return -right(*args)


@fault("I", "advantages advantages", "advantage-offset")
@met_in("NeMo-RL PR#2176: a key that no other sample has")
@in_place_of(advantage_estimators, "_centred")
def rewards_not_centred(samples):
    """Rewards are divided by the deviation, and their mean is not taken off."""
    return samples.rewards


@fault("I", "advantages advantages", "advantage-scale")
@met_in("miles PR#1573")
@around(advantage_estimators, "group_statistics")
def variance_for_deviation(right, *args):
    """The variance divides, not its root."""
    found = right(*args)
    return replace(found, std=found.std.square())


@fault("G", "advantages advantages", "advantage-groups order-not-restored")
@met_in("verl#2185, SkyRL PR#2209")
@around(grpo_trainer, "token_advantages")
def rewards_of_the_next_sample(right, rewards, *rest):
    """A reordered batch gets the rewards in their old order, one sample off."""
    return right(rewards.roll(1), *rest)


@fault(
    "I", "advantages advantages", "advantage-epsilon advantage-scale", kind="precision", precisions="float64"
)
@met_in("NeMo-RL PR#4158")
@around(advantage_estimators, "group_statistics")
def variance_by_cancellation(right, rewards, index, ddof):
    """The variance is E[x^2] - E[x]^2 in float32, where statistics are float64 in every precision."""
    found, single = right(rewards, index, ddof), rewards.float()
    mean, square = right(single, index, ddof).mean, right(single.square(), index, ddof).mean
    own = ((square - mean.square()).clamp(min=0) * found.count / (found.count - ddof)).sqrt()
    return replace(found, std=own.double())


@fault(
    "I",
    "advantages advantages",
    "advantage-of-equal-rewards",
    kind="precision",
    on="clip_cov/base",
    precisions="float64",
    blind=EVERY_CHECK,
)
@met_in("a group of equal rewards, whose mean is one rounding off")
@in_place_of(advantage_estimators, "_centred")
def equal_rewards_not_set_to_zero(samples):
    """Rounding of equal rewards about their mean is divided by a deviation of 0 and its epsilon, not set to 0."""
    return samples.rewards - samples.group.mean
