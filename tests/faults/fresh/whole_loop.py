"""Faults from rewards to the update, written at once, before any of them was tried."""

from dataclasses import replace

import torch

from regress.engine import grpo_trainer
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.training_step import weigh
from regress.grpo import policy_losses, token_losses
from regress.grpo.advantage_computation import token_advantages
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by
from tests.faults.fault import fault, met_in
from tests.faults.normalization import weighed
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.ranks.helpers import on_rank

ADVANTAGES = "advantages advantages"
WEIGHTS = "weights weights"
LOSS = "policy_loss policy_loss"


def estimated(patch, change):
    """Replace the advantages by ``change(right, rewards, groups, sequence, objective, *args, **rest)``."""
    right = token_advantages
    patch.setattr(grpo_trainer, "token_advantages", lambda *args, **rest: change(right, *args, **rest))


@fault("I", ADVANTAGES, "advantage-scale advantage-groups", on="dr_grpo/mbs4")
@met_in("rewards that a running deviation divides before the estimator")
@by(estimated)
def rewards_divided_by_their_deviation(right, rewards, *args, **rest):
    """Rewards are divided by their deviation over the rollout before baselines are taken off."""
    return right(rewards / rewards.std(), *args, **rest)


@fault("I", ADVANTAGES, "advantage-offset advantage-groups advantages", on="dr_grpo/mbs4")
@met_in("a mean over the answers that parse")
@by(estimated)
def baseline_of_rewarded_samples(right, rewards, groups, sequence, *args, **rest):
    """The baseline of a group is the mean of its rewards that are not 0."""
    found = right(rewards, groups, sequence, *args, **rest)
    for group in groups.unique():
        own = groups == group
        known = rewards[own]
        if bool((known != 0).any()):
            found[own[sequence]] += known.mean() - known[known != 0].mean()
    return found


@fault("I", ADVANTAGES, "advantage-groups")
@met_in("groups that are told by the number of a sample modulo the prompts, for samples that lie by prompt")
@by(estimated)
def samples_dealt_to_groups_in_turn(right, rewards, groups, *args, **rest):
    """Groups are those of a rollout that repeats the prompts as a whole, not each of them."""
    count = int(groups.max()) + 1
    return right(rewards, torch.arange(len(groups)) % count, *args, **rest)


@fault("I", ADVANTAGES, "advantage-scale advantage-groups advantage-epsilon")
@met_in("a deviation that is bounded from below, against groups of nearly equal rewards")
@by(estimated)
def deviation_bounded_from_below(right, rewards, groups, sequence, *args, **rest):
    """The deviation of a group is at least 0.6."""
    found = right(rewards, groups, sequence, *args, **rest)
    for group in groups.unique():
        deviation = float(rewards[groups == group].std())
        found[(groups == group)[sequence]] *= min(1.0, deviation / 0.6)
    return found


@fault("I", ADVANTAGES, "advantages advantage-groups advantage-scale")
@met_in("a clip of advantages against outliers")
@by(estimated)
def advantages_held_within_one(right, *args, **rest):
    """Advantages are clipped to the range from -1 to 1."""
    return right(*args, **rest).clamp(-1.0, 1.0)


@fault("I", ADVANTAGES, "advantages advantage-groups advantage-scale")
@met_in("weights of positive and negative samples of another recipe")
@by(estimated)
def negative_advantages_halved(right, *args, **rest):
    """Negative advantages count half."""
    found = right(*args, **rest)
    return torch.where(found < 0, found / 2, found)


@fault("I", ADVANTAGES, "advantage-scale advantage-groups advantages advantage-offset")
@met_in("REINFORCE++: whitening behind an estimator that normalizes by itself")
@by(estimated)
def advantages_whitened_over_the_batch(right, *args, **rest):
    """Advantages are whitened over all tokens once more."""
    found = right(*args, **rest)
    return (found - found.mean()) / (found.std() + 1e-8)


@fault("I", ADVANTAGES, "advantage-groups advantages")
@met_in("a reward of 0 for completions that were cut off")
@around(grpo_trainer, "rewards_of")
def truncated_completions_without_reward(right, trajectories, config):
    """A completion that was cut off has the reward 0, whatever it is given."""
    values, weights = right(trajectories, config)
    kept = [
        0.0 if one.finish_reason == "length" else value
        for one, value in zip(trajectories, values, strict=True)
    ]
    return kept, weights


@fault("A", WEIGHTS, "weights-denominator")
@met_in("a mean that counts the columns of the padded batch")
@by(weighed)
def columns_of_the_batch_counted(right, tokens, parts, objective, **rest):
    """The denominator is the number of rows times the longest completion."""
    found = torch.ones_like(right(tokens, parts, objective, **rest))
    longest = int(torch.bincount(tokens.sequence).max())
    return found / (longest * tokens.num_sequences)


@fault("A", WEIGHTS, "weights-denominator", on="dapo/mbs4")
@met_in("a denominator that an epsilon of another size keeps from 0")
@by(weighed)
def one_token_more_in_the_denominator(right, tokens, *args, **rest):
    """The sum over tokens is divided by their number plus one."""
    return right(tokens, *args, **rest) * (len(tokens.sequence) / (len(tokens.sequence) + 1))


@fault("A", WEIGHTS, "weights-denominator")
@met_in("a compromise between means over tokens and over samples")
@by(weighed)
def root_of_the_length(right, tokens, *args, **rest):
    """The tokens of a sample are divided by the root of its length."""
    lengths = torch.bincount(tokens.sequence, minlength=tokens.num_sequences)
    return right(tokens, *args, **rest) * lengths[tokens.sequence].sqrt()


@fault("A", WEIGHTS, "weights-denominator mean-of-means")
@met_in("shares of microbatches by their samples where a mean is over tokens, and the other way round")
@by(weighed)
def microbatches_weigh_by_their_tokens(right, tokens, parts, objective, **rest):
    """Each microbatch counts by its share of the tokens, and should by that of the samples."""
    found = right(tokens, parts, objective, **rest)
    for members in parts:
        here = torch.isin(tokens.sequence, torch.tensor(members))
        found[here] *= (int(here.sum()) / len(here)) / (len(members) / tokens.num_sequences)
    return found


@fault("J", "kl kl", "kl kl-estimator inputs-hold")
@met_in("reference log-probs that lie one token off in the loss alone")
@around(token_losses, "_kl")
def divergence_from_the_next_token(right, log_probs, reference, *rest):
    """The log-prob of a token is compared with the reference's of the one behind it."""
    return right(log_probs, reference.roll(-1), *rest)


@fault("J", "kl kl", "kl inputs-hold one-sign")
@met_in("a KL that is masked like the advantages of the best samples")
@around(token_losses, "_kl")
def divergence_of_long_gaps_alone(right, log_probs, reference, *rest):
    """Tokens that the policy has made likelier have no divergence."""
    return right(log_probs, reference, *rest) * (log_probs < reference)


@fault("J", "token_loss elementwise_loss", "coefficient token-loss")
@met_in("a coefficient of the KL that is halved by a schedule")
@around(token_losses, "_total")
def coefficient_of_the_divergence_halved(right, policy_loss, kl, entropy, objective):
    """The KL term counts half."""
    return right(policy_loss, kl, entropy, replace(objective, kl_coef=objective.kl_coef / 2))


@fault("K", "ratio prob_ratio", "ratio ratio-level inputs-hold")
@met_in("a ratio that is smoothed over its neighbours")
@around(token_losses, "importance_ratio")
def ratio_of_running_sums(right, new, old, sequence, *rest):
    """The log-ratio of a token is the sum of those of its sample so far."""
    gap = new - old
    sums = torch.cat([part.cumsum(0) for part in gap.split(torch.bincount(sequence).tolist())])
    return right(old + sums, old, sequence, *rest)


@fault("K", "old_log_probs old_log_probs", "old-log-probs", on="dapo/mbs4")
@met_in("the reference's log-probs, passed where the old policy's belong")
@around(Trainer, "_recorded")
def old_log_probs_less_a_constant(right, self, mini):
    """Old log-probs lack 0.05."""
    found = right(self, mini)
    return replace(found, tokens=replace(found.tokens, old_log_probs=found.tokens.old_log_probs - 0.05))


@fault("K", "old_log_probs old_log_probs", "order-not-restored old-log-probs", on="dapo/mbs4")
@met_in("results of microbatches that a dict returns in another order")
@around(Trainer, "_collected")
def old_log_probs_of_reversed_microbatches(right, self, source, microbatches, count):
    """Log-probs of the microbatches are put together from the last to the first."""
    out = torch.zeros(count, dtype=self.policy.log_prob_dtype)
    values = torch.cat(source.log_probs(microbatches)[::-1])
    out[torch.cat([micro.select for micro in microbatches])] = values
    return out


@fault("K", LOSS, "clip-bound clip-range clip-alone policy-loss", on="dapo/mbs4", update=2)
@met_in("DAPO without the higher upper bound: a clip range of one number")
@around(token_losses, "_policy_loss")
def upper_bound_that_of_the_lower(right, *args):
    """The ratio may grow as far as it may fall."""
    *first, objective, inputs = args
    return right(*first, replace(objective, clip_high=objective.clip_low), inputs)


@fault("K", LOSS, "one-sign clip-left-out clip-alone policy-loss", on="dapo/mbs4", update=2)
@met_in("a loss that clips the tokens to be made unlikelier alone")
@around(policy_losses, "ppo_clip")
def positive_advantages_not_clipped(right, t, o):
    """Tokens of positive advantage are not clipped."""
    return torch.where(t.advantages > 0, -t.ratio * t.advantages, right(t, o))


@fault("K", LOSS, "policy-loss loss-sign one-sign")
@met_in("rewards that were squared on the way to a weight")
@around(token_losses, "_policy_loss")
def advantages_without_their_sign(right, log_probs, ratio, advantages, *rest):
    """Every token is made likelier: the loss takes the size of the advantage."""
    return right(log_probs, ratio, advantages.abs(), *rest)


@fault("K", LOSS, "policy-loss last-token-masked inputs-hold")
@met_in("a bonus for tokens that end a completion")
@around(token_losses, "_policy_loss")
def last_tokens_count_twice(right, *args):
    """The policy loss of the last token of each sample is doubled."""
    found = right(*args)
    sequence = args[-1].samples.sequence_K
    last = torch.cat([sequence[1:] != sequence[:-1], torch.ones(1, dtype=torch.bool)])
    return torch.where(last, 2 * found, found)


@fault("M", f"param {EMBEDDING}", "learning-rate optimizer-settings")
@met_in("a scheduler that moves before the optimizer")
@by(around_the_update)
def rate_a_tenth_too_high(optimizer, update):
    """Each update is made with a learning rate that is larger by a tenth."""
    for group in optimizer.param_groups:
        group["lr"] *= 1.1
    update()
    for group in optimizer.param_groups:
        group["lr"] /= 1.1


@fault("M", f"optimizer {EMBEDDING}/exp_avg", "clip-of-gradients inputs-hold state-of-a-rank-unclipped")
@met_in("gradients that are clipped by value")
@by(around_the_update)
def gradients_clipped_by_value(optimizer, update):
    """Elements of the gradient are held within 0.01 before the update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.clamp_(-0.01, 0.01)
    update()


@fault("L", "grad_norm grad_norm", "norm")
@met_in("a norm of another order")
@around(LocalPolicy, "_total_norm")
def norm_of_absolute_values(right, self, norms):
    """The norm of all gradients is the sum of the norms of tensors."""
    return torch.stack([*norms.values()]).sum()


@fault(
    "L",
    "token_gradient token_gradient",
    "token-gradient-denominators",
    on="dr_grpo/mbs4",
    place="step0/rank0/micro1",
)
@met_in("a loss scale that grows between microbatches")
def each_microbatch_counts_more(patch):
    """The gradient of a microbatch counts a tenth more than that of the one before it."""
    seen = []

    def wrong(right, self, share):
        right(self, share * 1.1 ** len(seen))
        seen.append(share)

    def cleared(right, self):
        seen.clear()
        right(self)

    patch.around(LocalPolicy, "_backward", wrong)
    patch.around(LocalPolicy, "zero_grad", cleared)


@fault("R", "gradient", "gradient-of-one-tensor", names=r"lm_head\.weight")
@met_in("a hook that scales the gradient of the head")
def gradient_of_the_head_scaled(run):
    """The gradient of the output projection is multiplied by 0.7."""
    run.trainer.policy.model.lm_head.weight.register_hook(lambda grad: 0.7 * grad)


@fault(
    "R",
    "gradient",
    "gradient-missing gradient-zero backward-of-a-module gradient-of-one-layer",
    names=r"model\.layers\.1\.mlp\..*",
)
@met_in("an MLP in no_grad, to save memory")
def mlp_without_parameters_gradient(run):
    """The parameters of the last MLP get no gradient, and what lies before it gets its own."""
    for parameter in run.trainer.policy.model.model.layers[1].mlp.parameters():
        parameter.register_hook(torch.zeros_like)


@fault("B", "token_gradient token_gradient", "token-gradient-scale", on="dense/dp2", ranks=(1,))
@met_in("a rank that scales its loss by its own number of tokens")
@around(ParallelPolicy, "_backward")
def loss_of_a_rank_scaled(right, self, share):
    """The loss of the second rank enters the backward pass times 1.3."""
    return right(self, share * 1.3 if on_rank(1) else share)


@fault("B", WEIGHTS, "weights-world-size weights-denominator", on="dense/dp2")
@met_in("a denominator of own tokens, averaged by ranks")
@by(weighed)
def weights_of_the_ranks_added(right, *args, **rest):
    """Weights are multiplied by the number of ranks, and gradients are summed all the same."""
    return weigh(*args, **rest) * rest.get("ranks", 1)
