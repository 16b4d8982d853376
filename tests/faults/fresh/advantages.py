"""Faults on the way from rewards to advantages."""

from dataclasses import replace

import torch
import torch.distributed as dist

from regress.engine import grpo_trainer
from regress.engine.grpo_trainer import Trainer
from regress.grpo import advantage_computation, advantage_estimators
from regress.grpo.advantage_estimators import group_mean, grpo
from regress.grpo.discounted_returns import padded, positions
from regress.grpo.group_statistics import group_statistics
from regress.grpo.reward_combination import deviation
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.advantages import with_groups
from tests.faults.fault import LOG_PROB_CHECKS, fault, met_in
from tests.faults.ranks.helpers import on_rank

ADVANTAGES = "advantages advantages"


# names the rewards
@fault("I", ADVANTAGES, "advantage-penalty", on="rloo/base", blind=LOG_PROB_CHECKS)
@met_in("a clip of rewards that is configured and not applied")
@around(grpo_trainer, "token_advantages")
def bounds_of_rewards_left_out(right, rewards, groups, sequence, o, *args, **rest):
    """Rewards enter the baseline as they are, whatever their bounds."""
    return right(rewards, groups, sequence, replace(o, reward_min=None, reward_max=None), *args, **rest)


@fault("I", ADVANTAGES, "advantage-scale advantage-groups", on="kl_cov/base")
@met_in("GDPO: rewards that are summed before they are normalized")
@around(grpo_trainer, "token_advantages")
def rewards_summed_first(right, rewards, groups, sequence, o, *args, **rest):
    """Rewards of several functions are summed and then normalized, not the other way round."""
    weights = torch.tensor(rest.pop("reward_weights"), dtype=rewards.dtype)
    changed = replace(o, reward_aggregation="sum_then_normalize", normalize_advantages=False, scale="group")
    return right((rewards * weights).sum(1), groups, sequence, changed, *args, **rest)


# the last one names a group of one
@fault("I", ADVANTAGES, "one-sample advantage-groups", on="trl/base")
@met_in("TRL PR#5773")
@around(grpo_trainer, "token_advantages")
def lone_sample_without_advantage(right, rewards, groups, sequence, o, *args, **rest):
    """The only sample of a group has the advantage 0, and should have its reward."""
    return right(rewards, groups, sequence, replace(o, single_sample="zero"), *args, **rest)


@fault("I", ADVANTAGES, "advantage-offset", on="reinforce_plus_plus/base")
@met_in("verl: whitening with shift_mean=False")
@in_place_of(advantage_computation, "whiten")
def whitened_around_the_mean(values, objective):
    """Returns are divided by their deviation, and keep their mean."""
    return values * torch.rsqrt(deviation(values, objective.ddof).square() + objective.whiten_eps)


# names the return of each token
@fault("I", ADVANTAGES, "advantage-penalty", on="reinforce_plus_plus/base")
@met_in("a discount that runs from the wrong end")
@in_place_of(advantage_computation, "returns_of")
def discounted_from_the_first_token(rewards, sequence, gamma, count):
    """A return is discounted by the tokens before it, not by those between it and the reward."""
    position = positions(sequence, count)
    rows = padded(rewards, sequence, position, count)
    total = rows.flip(1).cumsum(1).flip(1)
    return total[sequence, position] * gamma ** position.to(rewards.dtype)


# names the token of the reward
@fault("I", ADVANTAGES, "advantage-penalty", on="reinforce_plus_plus/base")
@met_in("OpenRLHF: the reward at the token before the end token")
@around(advantage_computation._Samples, "token_rewards")
def reward_one_token_early(right, self):
    """The reward of a sample stands at its last token but one, and its last token earns nothing."""
    found = right(self)
    lengths = self._lengths
    rows = torch.nonzero(lengths > 1)[:, 0]
    last = lengths.cumsum(0)[rows] - 1
    reward = self._rewards.nan_to_num()[rows]
    found[last] -= reward
    found[last - 1] += reward
    return found


# names other weights of the samples of a group
@fault("I", ADVANTAGES, "advantage-groups", on="sapo/base")
@met_in("a baseline that forgets the lengths of samples")
def baseline_not_weighted_by_length(patch):
    """The baseline is the plain mean of the group, and should weigh rewards by the lengths of their samples."""

    def wrong(samples, objective):
        return group_mean(samples, objective)

    patch.setattr(advantage_estimators, "opo", wrong)


@fault("I", ADVANTAGES, "advantage-groups", on="on_policy/base", blind=("mean 1e-3",))
@met_in("NeMo-RL PR#2176: a key made of the prompt")
@around(Trainer, "_advantages")
def groups_by_the_text_of_the_prompt(right, self, trajectories, minis):
    """A prompt that a step asks twice makes one group of both."""
    merged = [replace(one, group_id=str([*one.tokens][: one.prompt_length])) for one in trajectories]
    return right(self, merged, minis)


# the last one names a filter, after which no group of the first step has a spread
@fault(
    "I", ADVANTAGES, "advantage-offset advantage-groups advantage-scale advantage-zero", on="on_policy/base"
)
@met_in("a filter of truncated completions before the statistics of their group")
def truncated_completions_leave_their_group(patch):
    """Mean and deviation of a group are those of its completions that ended by themselves."""
    cut = []

    def noted(of_trainer, self, samples, *rest):
        cut[:] = [sample.finish_reason == "length" for sample in samples]
        return of_trainer(self, samples, *rest)

    def wrong(right, rewards, groups, *args, **rest):
        alone = torch.arange(len(groups)) + int(groups.max()) + 1
        return right(rewards, torch.where(torch.tensor(cut), alone, groups), *args, **rest)

    patch.around(Trainer, "_advantages", noted)
    patch.around(grpo_trainer, "token_advantages", wrong)


# groups are those of other samples' rewards, and so are their means and deviations
@fault(
    "I",
    "advantages",
    "order-not-restored advantage-groups advantage-offset advantage-scale",
    on="dapo/dp3-dealt",
    ranks=(0, 1, 2),
)
@met_in("verl#2185: rewards gathered rank by rank of samples that were dealt out")
@around(grpo_trainer, "token_advantages")
def rewards_in_the_order_of_ranks(right, rewards, *args, **rest):
    """Rewards of the first rank's samples stand first, then those of the second: groups get others' rewards."""
    ranks = dist.get_world_size()
    order = torch.cat([torch.arange(rank, len(rewards), ranks) for rank in range(ranks)])
    return right(rewards[order], *args, **rest)


# the first one names a limit; only one sample of that rank is beyond it
@fault("I", "advantages", "advantage-groups one-sample", on="dense/dp2", ranks=(1,))
@met_in("a limit of advantages that one node still has in its configuration")
@around(grpo_trainer, "token_advantages")
def advantages_limited_on_a_rank(right, *args, **rest):
    """One rank limits advantages to 1 in size."""
    found = right(*args, **rest)
    return found.clamp(-1.0, 1.0) if on_rank(1) else found


def _estimated_by(patch, name, wrong):
    """Let an estimator of advantages be another function."""
    patch.setattr(advantage_estimators, name, wrong)


# both name the baseline
@fault("I", ADVANTAGES, "advantage-offset advantages")
@met_in("a robust baseline of another algorithm")
def median_for_the_mean(patch):
    """The baseline of a group is the median of its rewards."""

    def wrong(samples, o):
        count = int(samples.index.max()) + 1
        medians = torch.stack([samples.rewards[samples.index == group].median() for group in range(count)])
        return grpo(replace(samples, group=replace(samples.group, mean=medians[samples.index])), o)

    _estimated_by(patch, "grpo", wrong)


# of three samples each: a factor for all; advantage-penalty names the normalization of rewards
@fault("I", ADVANTAGES, "advantage-scale advantage-penalty advantages", on="rloo/base")
@met_in("RLOO that takes the mean of the whole group")
def own_reward_in_the_baseline(patch):
    """The baseline of a sample is the mean of its group, its own reward included, and should leave that out."""
    _estimated_by(patch, "rloo", grpo)


# all four name the constant beside the deviation, or the normalization
@fault("I", ADVANTAGES, "advantage-epsilon advantage-scale advantage-groups advantages", on="tools/packed")
@met_in("unsloth-zoo PR#832: implementations that add eps in different places")
def epsilon_added_to_the_variance(patch):
    """Rewards are divided by the root of variance and eps together, not by the deviation plus eps."""

    def wrong(samples, o):
        root = (samples.group.std.square() + o.eps).sqrt()
        return grpo(replace(samples, group=replace(samples.group, std=root - o.eps)), o)

    _estimated_by(patch, "grpo", wrong)


@fault(
    "I",
    "advantages",
    "advantage-of-a-rank order-not-restored advantage-groups advantages",
    on="gpt2/dp2-packed-budget48",
    ranks=(1,),
)
@met_in("a batch of advantages that each worker reads from its beginning")
@around(Trainer, "_advantages")
def advantages_of_the_first_rank_on_all(right, self, samples, minis):
    """Each rank gives its samples the advantages that the first rank gives to its own."""
    found = right(self, samples, minis)
    (mini,) = minis
    sequence = mini.tokens.sequence
    of_samples = found.new_zeros(len(samples)).scatter(0, sequence, found)
    plan = self.world.plan
    own, first = (plan.samples(len(samples), rank) for rank in (dist.get_rank(), 0))
    read = torch.arange(len(samples))
    read[own] = torch.tensor(first[: len(own)])
    return of_samples[read][sequence]


# advantage-scale: one number for each group; advantage-epsilon: statistics in a lower precision
@fault(
    "I",
    "advantages advantages",
    "advantage-scale advantage-epsilon advantages",
    kind="precision",
    on="moe/packed-mbs3",
)
@met_in("statistics of groups that are gathered as half-precision tensors")
@in_place_of(advantage_estimators, "group_statistics")
def deviation_in_bfloat16(*args):
    """The deviation of each group is rounded to half precision before it divides."""
    found = group_statistics(*args)
    return replace(found, std=rounded(found.std))


@fault("I", "advantages advantages", "advantage-groups")
@met_in("NeMo-RL PR#2176")
@by(with_groups)
def prompts_share_a_group(groups):
    """Two prompts have one key, and their samples one group."""
    return groups // 2
