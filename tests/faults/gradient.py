"""Faults in the backward pass between the loss and the log-probs: every value of the forward pass is right."""

import torch

from regress.grpo import token_losses
from regress.grpo.segment_sums import segment_sum
from regress.replay.fault_injection import around, by
from regress.replay.probes.loss_probes import (
    before_backward,
    entropy_detached,
    gradient_through_the_clip,
    in_policy_loss,
    kl_detached,
    loss_divided_by_microbatches,
    valued,
)
from tests.faults.fault import FORWARD_CHECKS, equivalent, fault, met_in

fault("R", "token_gradient token_gradient", "kl-detached", place="step0/rank0/micro0", blind=FORWARD_CHECKS)(
    met_in("NeMo-RL PR#2506: a term without gradient")(kl_detached)
)


@fault(
    "R",
    "token_gradient token_gradient",
    "policy-loss-detached loss-detached",
    on="dense/mbs4 dr_grpo/mbs4",
    place="step0/rank0/micro0",
    blind=FORWARD_CHECKS,
)
@met_in("slime PR#179")
@around(token_losses, "importance_ratio")
def old_log_probs_not_detached(right, *args):
    """Old log-probs carry the same gradient as the new ones, so that the ratio has none."""
    return right(*args).detach()


@fault("R", "token_gradient token_gradient", "kl-gradient-estimator", place="step0/rank0/micro0")
@met_in("verl: k3+ in place of k3")
@around(token_losses, "kl_estimate")
def kl_gradient_of_another_estimator(right, policy, reference, objective):
    """The value of k3 with the gradient of k2."""
    value = right(policy, reference, objective)
    return valued(value, 0.5 * (policy - reference).square())


@fault("R", "token_gradient token_gradient", "token-gradient", place="step0/rank0/micro0")
@met_in("a reward with a KL penalty that keeps its graph")
@by(in_policy_loss)
def advantages_not_detached(right, log_probs, ratio, adv, objective):
    """Advantages depend on the log-probs, as those of a reward with a KL penalty do."""
    return right(log_probs, ratio, valued(adv, 0.5 * log_probs), objective)


fault(
    "R",
    "entropy_gradient entropy_gradient",
    "entropy-detached",
    on="dr_grpo/mbs4",
    place="step0/rank0/micro0",
)(met_in("verl: entropy computed under no_grad")(entropy_detached))

fault("R", "token_gradient token_gradient", "gradient-through-the-clip", place="step0/rank0/micro0")(
    met_in("a clamp kernel whose backward passes all")(gradient_through_the_clip)
)


@fault("R", "token_gradient token_gradient", "clip-stops-too-much", place="step0/rank0/micro0")
@met_in("GMPO#4")
@by(in_policy_loss)
def gradient_of_the_clipped_term(right, log_probs, ratio, adv, objective):
    """The value is that of the minimum, the gradient that of the clipped term."""
    clipped = ratio.clamp(*objective.clip_range)
    return valued(right(log_probs, ratio, adv, objective), -clipped * adv)


@fault("R", "token_gradient token_gradient", "clip-gradient-side", place="step0/rank0/micro0")
@met_in("takuseno/ppo#3")
@by(in_policy_loss)
def clip_gradient_on_the_wrong_side(right, log_probs, ratio, adv, objective):
    """The gradient is that of the maximum, not the minimum."""
    clipped = ratio.clamp(*objective.clip_range)
    return valued(right(log_probs, ratio, adv, objective), -torch.maximum(ratio * adv, clipped * adv))


@fault(
    "R",
    "token_gradient token_gradient",
    "ratio-not-in-the-gradient",
    on="dense/mbs4 dr_grpo/mbs4",
    place="step0/rank0/micro0",
)
@met_in("Liger-Kernel#1082")
@by(in_policy_loss)
def ratio_detached(right, log_probs, ratio, adv, objective):
    """The clipped loss has the gradient of the plain policy gradient."""
    return valued(right(log_probs, ratio, adv, objective), -log_probs * adv)


@fault(
    "R",
    "token_gradient token_gradient",
    "ratio-not-detached sampler-weights-not-detached",
    on="cispo/mbs4",
    place="step0/update0/rank0/micro0",
)
@met_in("MiniMax-M1's weight without stop-gradient")
@by(in_policy_loss)
def weight_not_detached(right, log_probs, ratio, adv, objective):
    """The clipped ratio of CISPO, which is a weight, carries a gradient of its own."""
    weight = ratio.clamp(*objective.clip_range)
    return -weight * adv * log_probs


@equivalent(
    "R",
    on="gspo/mbs4",
    proof="all tokens of a sample have one weight, one advantage and one ratio: the sum over its n tokens of a "
    "gradient of 1 / n through the mean is the gradient of 1 through the own log-prob (GSPO-token, arXiv 2507.18071)",
)
@met_in("EasyR1 PR#596")
@around(token_losses, "importance_ratio")
def ratio_gradient_of_each_token(right, log_probs, *args):
    """The ratio of a sample has a gradient that reaches each token's own log-prob only."""
    ratio = right(log_probs, *args).detach()
    return valued(ratio, ratio * log_probs)


@fault(
    "R", "token_gradient token_gradient", "ratio-gradient-level", on="gspo/mbs4", place="step0/rank0/micro0"
)
@met_in("EasyR1 PR#596: a mean whose backward pass is that of a sum")
@around(token_losses, "importance_ratio")
def ratio_gradient_of_the_sum(right, log_probs, old, sequence, count, *rest):
    """The ratio of a sample has the gradient of a sum over its tokens, and its value is made of their mean."""
    ratio = right(log_probs, old, sequence, count, *rest).detach()
    return valued(ratio, ratio * segment_sum(log_probs, sequence, count)[sequence])


fault("A", "token_gradient token_gradient", "token-gradient-of-microbatches", place="step0/rank0/micro0")(
    met_in("transformers PR#35438, unsloth-zoo PR#1023")(loss_divided_by_microbatches)
)


@fault("O", "token_gradient token_gradient", "token-gradient-power-of-two", place="step0/rank0/micro0")
@met_in("a loss scale that is never divided out")
@by(before_backward)
def loss_scaled(share, _):
    """The loss scale is never divided out."""
    return share * 1024


@fault("R", "token_gradient token_gradient", "token-gradient-sign", place="step0/rank0/micro0")
@met_in("a loss that is maximized")
@by(before_backward)
def loss_reversed(share, _):
    return -share


@fault("A", "token_gradient token_gradient", "token-gradient-denominators", place="step0/rank0/micro0")
@met_in("transformers PR#34191")
@by(before_backward)
def denominator_of_the_microbatch_on_the_way_back(share, number):
    """Each microbatch enters the backward pass with a factor of its own."""
    return share * (0.5, 1.25, 2.0)[number]
