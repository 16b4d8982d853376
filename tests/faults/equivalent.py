"""Bugs that compute the same here, each with the proof: none may be flagged."""

from dataclasses import replace

import torch

from regress.engine import causal_lm_policy as policy
from regress.engine import training_passes
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.grpo import token_losses
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.loss_probes import valued
from tests.faults.advantages import with_groups
from tests.faults.fault import equivalent, met_in
from tests.faults.normalization import weighed

CONSTANT = "the schedule of these cases is constant: every multiple of its length has the same learning rate"


@equivalent("M", proof=CONSTANT)
@met_in("accelerate PR#999, transformers PR#24088")
@around(Trainer, "_schedule")
def schedule_stepped_by_microbatches(right, self, outcome):
    """The schedule goes on after every microbatch."""
    for _ in range(3):
        right(self, outcome)


@equivalent("M", proof=CONSTANT)
@met_in("lightning#1772")
@in_place_of(Trainer, "_schedule")
def schedule_not_stepped(*_):
    """The schedule stays where it is."""
    return


@equivalent(
    "G",
    on="dense/mbs4 dense/packed-mbs3",
    proof="rotary attention depends on differences of positions within a sample alone, which an offset leaves",
)
@met_in("LlamaFactory PR#7318")
@around(LocalPolicy, "_run")
def rotary_positions_from_seven(right, self, model, micro, *rest):
    """The model counts positions from seven."""
    return right(self, model, replace(micro, position_ids=micro.position_ids + 7), *rest)


@equivalent(
    "H",
    on="dense/mbs4 dr_grpo/mbs4",
    proof="a softmax does not change with a constant that is added to all of its logits",
)
@met_in("logits that are shifted by their maximum before the softmax")
@around(policy, "token_log_probs")
def logits_shifted(right, logits, *args, **rest):
    """A constant is added to the logits of each token."""
    return right(logits + 0.5, *args, **rest)


@equivalent("K", proof="no loss of these cases exceeds a hundred times the size of its advantage")
@met_in("tianshou#433")
@around(token_losses, "_dual_clip")
def dual_clip_far_away(right, policy, advantages, o):
    """A dual clip at 100 is on."""
    return right(policy, advantages, replace(o, dual_clip=100.0))


@equivalent(
    "I",
    on="dense/mbs4 dr_grpo/mbs4",
    proof="all tokens of a sample have one advantage, and the order of groups enters no statistic",
)
@met_in("R1-V#67")
@by(with_groups)
def groups_in_reversed_order(groups):
    """Groups are numbered from the last to the first."""
    return groups.max() - groups


@equivalent(
    "J", on="dr_grpo/mbs4 dapo/mbs4", proof="these objectives have no KL term: its estimator is never called"
)
@met_in("Schulman: the direction of k2")
@around(token_losses, "kl_estimate")
def kl_of_another_sign(right, *args):
    """The divergence has the wrong sign where there is none."""
    return -right(*args)


@equivalent(
    "A",
    on="dense/mbs4 dense/mbs3",
    proof="a mean over samples of means over their tokens is a mean of such means over microbatches of equally many "
    "samples",
)
@met_in("transformers PR#34191")
@by(weighed)
def mean_of_equal_microbatches(right, tokens, parts, objective, **rest):
    """The loss is the mean of each microbatch's mean over samples."""
    return right(tokens, parts, replace(objective, denominator_scope="microbatch"), **rest)


@equivalent("Q", proof="no token sees padding, and no loss token lies there")
@met_in("MemGen PR#33")
@around(LocalPolicy, "_run")
def padding_of_the_stop_token(right, self, model, micro, *rest):
    """Padding is filled with token 1 in the model's inputs."""
    there = torch.from_numpy(micro.layout.attention_mask)
    return right(self, model, replace(micro, input_ids=torch.where(there, micro.input_ids, 1)), *rest)


@equivalent("R", proof="token_loss detaches its advantages, so that a graph of theirs gets no gradient")
@met_in("advantages that keep a graph")
@around(training_passes, "token_loss")
def advantages_with_a_graph(right, log_probs, old, advantages, *args, **rest):
    """Advantages carry a graph of their own."""
    return right(log_probs, old, valued(advantages, log_probs), *args, **rest)
