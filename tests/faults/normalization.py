"""Faults in the weights of tokens: denominators and aggregation."""

from dataclasses import replace

import torch

from regress.engine import grpo_trainer
from regress.engine.training_step import weigh
from regress.replay.fault_injection import around, by
from regress.replay.probes.loss_probes import last_token_not_counted
from tests.faults.fault import Shown, fault, met_in


@fault(
    "A",
    "weights weights",
    "mean-of-means",
    on="dense/longest-first",
    place="step0/rank0/micro0",
    tokens="all",
    also=(Shown("dapo", "mbs4", "weights weights", place="step0/update0/rank0/micro0", tokens="all"),),
    silent={"dense/mbs4": "a mean over samples, of which every microbatch has four"},
)
@met_in("transformers PR#34191, open-instruct PR#1161")
@around(grpo_trainer, "weigh")
def mean_of_means(right, tokens, parts, objective, **rest):
    """The loss is the mean of each microbatch's mean."""
    return right(tokens, parts, replace(objective, denominator_scope="microbatch"), **rest)


fault("A", "weights weights", "weights-denominator", tokens="all")(
    met_in("TRL issue#6369: a denominator of other tokens")(last_token_not_counted)
)


def weighed(patch, change):
    """Replace the weights of the loss tokens by ``change(right, tokens, partition, objective, **rest)``."""
    right = weigh
    patch.setattr(grpo_trainer, "weigh", lambda *args, **rest: change(right, *args, **rest))


@fault("A", "weights weights", "weights-denominator")
@met_in("verl#2776")
@by(weighed)
def token_mean_for_sequence_mean(right, tokens, parts, objective, **rest):
    """The mean is over all tokens of the batch, in place of one over samples of those over their tokens."""
    return right(tokens, parts, replace(objective, aggregation="token-mean"), **rest)


@fault("A", "weights weights", "mean-of-means weights-denominator", on="dapo/mbs4", tokens="all")
@met_in("verl#5625, PR#5641")
@by(weighed)
def token_mean_times_share_of_samples(right, tokens, parts, *args, **rest):
    """A mean over the tokens of each microbatch, times its share of the samples."""
    weights = right(tokens, parts, *args, **rest)
    for members in parts:
        here = torch.isin(tokens.sequence, torch.tensor(members))
        weights[here] = len(members) / sum(map(len, parts)) / max(int(here.sum()), 1)
    return weights


@fault(
    "A",
    "weights weights",
    "mean-of-means weights-denominator",
    on="dense/reversed",
    silent={"dense/mbs4": "twelve samples fill three microbatches of four"},
)
@met_in("transformers PR#39659")
@by(weighed)
def last_window_divided_by_all(right, tokens, parts, *args, **rest):
    """The last microbatch, which is not full, is divided by the samples of a full one."""
    weights = right(tokens, parts, *args, **rest)
    most = max(map(len, parts))
    for members in parts:
        weights[torch.isin(tokens.sequence, torch.tensor(members))] *= len(members) / most
    return weights


@fault(
    "A", "weights weights", "weights-denominator", on="dapo/mbs4", silent={"dense": "no completion is masked"}
)
@met_in("TRL issue#6369, PR#6439")
@by(weighed)
def masked_completions_counted(right, tokens, *args, completion_lengths, **rest):
    """The denominator counts the tokens of completions that are masked because they were truncated."""
    weights = right(tokens, *args, completion_lengths=completion_lengths, **rest)
    return weights * len(tokens) / sum(completion_lengths)


@fault(
    "A",
    "weights weights",
    "weights-denominator weights-world-size",
    tokens="all",
    blind=("cosine 0.99", "allclose", "mean 1e-3"),
)
@met_in("TRL#5619, PR#6024")
@by(weighed)
def loss_of_half_the_steps(right, *args, **rest):
    """The loss is scaled for two accumulation steps a generation, and there is one."""
    return 2.0 * right(*args, **rest)


@fault("A", "weights weights", "weights-denominator mean-of-means", on="dr_grpo/mbs4")
@met_in("Dr. GRPO with the longest completion as its constant")
@by(weighed)
def length_of_the_longest(right, tokens, parts, objective, **rest):
    """The constant that divides is the length of the longest completion of a microbatch."""
    return right(tokens, parts, replace(objective, norm_rule="longest"), **rest)


@fault("A", "weights weights", "weights-denominator", tokens="all")
@met_in("GRPO without a mean over samples")
@by(weighed)
def sum_over_tokens(right, tokens, parts, objective, **rest):
    """Nothing divides: a sum over all tokens."""
    return right(tokens, parts, replace(objective, aggregation="token-sum"), **rest)
