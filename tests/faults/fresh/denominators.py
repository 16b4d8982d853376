"""Faults in denominators and aggregation: what a loss is divided by."""

from dataclasses import replace

import torch

from regress.engine import grpo_trainer as trainer
from regress.engine import training_step
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import LossTokens
from regress.grpo import token_losses
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.parallel.pipeline_parallel import Pipeline
from regress.replay.fault_injection import around, by
from tests.faults.fault import FORWARD_CHECKS, LOG_PROB_CHECKS, fault, met_in


def times(mini, factor):
    """Return a mini-batch whose weights are multiplied by a factor."""
    weights = mini.tokens.weights
    return replace(mini, tokens=replace(mini.tokens, weights=weights * factor))


def divided(patch, factor):
    """Multiply the weight of every loss token by a factor."""
    right = Trainer._laid_out

    def wrong(self, *args):
        return times(right(self, *args), factor(self))

    patch.setattr(Trainer, "_laid_out", wrong)


@fault(
    "A",
    "token_gradient",
    "token-gradient-of-ranks token-gradient-power-of-two token-gradient-scale",
    on="tied/dp2-pp2-mbs2",
    blind=FORWARD_CHECKS,
)
@met_in("torchtitan#2972")
@around(Pipeline, "forward_backward")
def loss_divided_by_stages(right, self, micros, loss, *rest):
    """The loss enters the backward pass divided by the number of stages, and is reported without that."""

    def divided(micro, out):
        value, result = loss(micro, out)
        return value / self.group.size(), result

    return right(self, micros, divided, *rest)


# the last one names the samples that the denominator counts
@fault("A", "weights weights", "weights-world-size weights-denominator", on="dense/dp2-cp2-packed")
@met_in("NeMo Automodel PR#3830, verl#2857: samples counted by an all-reduce over ranks that share them")
@by(divided)
def samples_counted_on_every_context_rank(trainer):
    """The number of samples that divides is summed over context-parallel ranks, too, which hold the same ones."""
    return 1.0 / trainer.world.plan.mesh.sizes["cp"]


# names norm_length
@fault("A", "weights weights", "weights-denominator", on="dr_grpo/packed-longest-first")
@met_in("Dr. GRPO: max_model_len for max_tokens as the constant")
@by(divided)
def limit_of_the_whole_sequence_divides(trainer):
    """The constant that divides is the limit of prompt and completion together, not that of completions."""
    data = trainer.config.data
    return data.max_completion_length / data.max_seq_length


# names the tokens that are counted
@fault("A", "weights weights", "weights-denominator", on="dapo/reversed")
@met_in("TRL: num_items_in_batch of the generation batch, and a loss of one of its mini-batches")
@around(Trainer, "_cut")
def tokens_of_the_whole_rollout_divide(right, self, *args):
    """Each mini-batch is divided by the tokens of all mini-batches of its rollout."""
    minis = right(self, *args)
    total = sum(len(mini.tokens) for mini in minis)
    return [times(mini, len(mini.tokens) / total) for mini in minis]


@fault("A", "weights weights", "weights-denominator", on="dense/dynamic")
@met_in("verl#2776: a token mean within each prompt, in place of one within each sample")
@around(Trainer, "_laid_out")
def mean_over_groups_of_means_over_tokens(right, self, *args):
    """The mean is over all tokens of a group, and then over groups: long samples weigh more than short ones."""
    found = right(self, *args)
    tokens = found.tokens
    numbers = {key: n for n, key in enumerate(dict.fromkeys(group for group, _ in found.batch.keys))}
    group = torch.tensor([numbers[key] for key, _ in found.batch.keys])[tokens.sequence]
    sizes = torch.bincount(group, minlength=len(numbers)).to(tokens.weights.dtype)
    weights = 1.0 / (len(numbers) * sizes[group])
    return replace(found, tokens=replace(tokens, weights=weights))


def _reweighed(patch, change):
    """Give the loss tokens of a mini-batch the weights ``change(trainer, mini)``."""
    right = Trainer._laid_out

    def wrong(self, *args):
        found = right(self, *args)
        return replace(found, tokens=replace(found.tokens, weights=change(self, found)))

    patch.setattr(Trainer, "_laid_out", wrong)


@fault("A", "weights weights", "weights-denominator")
@met_in("lengths from attention_mask in place of the mask of completions")
@by(_reweighed)
def prompts_counted_in_the_length(_, mini):
    """A sample's sum is divided by all of its tokens, those of the prompt included."""
    tokens = mini.tokens
    own = segment_lengths(tokens.sequence, tokens.num_sequences)
    share = own / torch.tensor(mini.batch.lengths)
    return tokens.weights * share[tokens.sequence]


# a row is a microbatch, so this is the mean of their means
@fault(
    "A",
    "weights weights",
    "weights-denominator mean-of-means",
    on="dense/dp4-packed-mbs2",
    ranks=(0, 1, 2, 3),
)
@met_in("a sequence mean over packed rows")
@by(_reweighed)
def packed_rows_taken_for_samples(self, mini):
    """The mean over tokens is taken of each packed row, and then the mean over rows."""
    tokens = mini.tokens
    rows = mini.batch.partition(self._plan(), self.world.plan)
    weights = torch.zeros_like(tokens.weights)
    for members in rows:
        inside = torch.isin(tokens.sequence, torch.tensor(members))
        weights[inside] = 1.0 / (len(rows) * max(int(inside.sum()), 1))
    return weights


@fault("A", "weights weights", "weights-denominator", on="vespo/base", blind=LOG_PROB_CHECKS)
@met_in("Dr. GRPO: the longest completion of another batch as its constant")
@around(training_step, "batch_weights")
def longest_of_the_whole_batch(right, *args, completion_lengths, **rest):
    """Each microbatch is divided by the longest completion of the mini-batch, not by its own longest."""
    longest = [max(completion_lengths)] * len(completion_lengths)
    return right(*args, completion_lengths=longest, **rest)


@fault("A", "weights weights", "weights-denominator", on="cispo_kl/base")
@met_in("TRL issue#6369")
@around(training_step, "batch_weights")
def samples_without_tokens_counted(right, sequence, count, objective, **rest):
    """Samples of which nothing is trained on count in the mean over samples."""
    return right(sequence, count, replace(objective, count_empty_rows=True), **rest)


@fault("A", "entropy_loss", "token-loss entropy-loss", on="trl/base", blind=("mean 1e-3",))
@met_in("open-instruct PR#535")
@around(trainer, "entropy_weights")
def entropy_averaged_over_padding(right, sequence, count, *args, partition, **rest):
    """The mean entropy of a microbatch divides by its rows times the longest of them, padding included."""
    found = right(sequence, count, *args, partition=partition, **rest)
    if found is None:
        return None
    lengths = segment_lengths(sequence, count)
    factor = torch.ones(count, dtype=found.dtype)
    for members in partition:
        own = lengths[list(members)]
        factor[list(members)] = float(own.sum()) / float(max(int(own.max()), 1) * len(own))
    return found * factor[sequence]


def _of_informative(tokens):
    sizes = segment_sum(tokens.advantages.abs(), tokens.sequence, tokens.num_sequences)
    counted = max(int((sizes > 0).sum()), 1)
    return replace(tokens, weights=tokens.weights * (tokens.num_sequences / counted))


# names the samples that are counted
@fault("A", "weights weights", "weights-denominator", on="tools/dynamic")
@met_in("DAPO: groups without advantage that are filtered out of the denominator alone")
@around(Trainer, "mini_batches")
def groups_without_advantage_not_counted(right, self, samples):
    """The denominator counts the samples that have an advantage, and all samples enter the sum."""
    return [replace(mini, tokens=_of_informative(mini.tokens)) for mini in right(self, samples)]


# mean-of-means: names a denominator that is counted on a rank alone
@fault("A", "weights", "weights-denominator mean-of-means", on="dense/cp2-zigzag-packed-mbs4")
@met_in("Megatron#7452 findings 3 and 9: a length that is counted behind the split of the sequence")
@around(LossTokens, "select")
def length_on_the_rank_divides_a_sample(right, self, index, sequence, count):
    """The mean over a sample divides by the number of its tokens on this rank, not on all ranks that share it."""
    found = right(self, index, sequence, count)
    lengths = segment_lengths(sequence, count)[sequence]
    own = torch.ones_like(found.weights) / (self.num_sequences * lengths)
    return replace(found, weights=own)


@fault("A", "token_loss elementwise_loss", "token-loss term-left-out coefficient")
@met_in("open-instruct PR#535")
@around(token_losses, "_total")
def kl_averaged_over_everything(right, policy, kl, entropy, objective):
    """The KL term is one mean over all tokens of the microbatch, added to each of them."""
    return right(policy, None if kl is None else kl.mean().expand_as(kl), entropy, objective)
