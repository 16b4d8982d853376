"""Faults in the loss."""

import math
from dataclasses import replace

import torch

from regress.grpo import policy_losses, token_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.kl_divergence import kl_estimate
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.loss_probes import (
    another_estimator,
    clip_range_off,
    coefficients_off,
    entropy_bonus_reversed,
    minimum_before_the_advantage,
    ratio_of_sums,
)
from tests.faults.fault import EVERY_CHECK, Shown, fault, met_in


@fault(
    "K",
    "policy_loss policy_loss",
    "clip-sides",
    on="dapo/mbs4",
    place="step0/update1/rank0/micro0",
    update=1,
    tokens="above or below 0.8 1.2",
    also=(
        Shown(
            "gspo",
            "mbs4",
            "policy_loss policy_loss",
            place="step0/rank0/micro1",
            tokens="above or below 0.9 1.1",
        ),
    ),
    silent={"dense/mbs4": "both sides are 0.2"},
)
@met_in("DAPO's clip_low and clip_high exchanged")
@in_place_of(ObjectiveFields, "clip_range")
def clip_sides_swapped(o):
    return (1.0 - o.clip_high, 1.0 + o.clip_low)


fault(
    "K",
    "policy_loss policy_loss",
    "minimum-before-advantage",
    place="step0/rank0/micro0",
    tokens="clipped and disliked",
)(met_in("takuseno/ppo#3")(minimum_before_the_advantage))

fault("J", "kl kl", "kl-estimator", place="step0/rank0/micro0", tokens="all")(
    met_in("open-instruct#534, NeMo-RL PR#2506")(another_estimator)
)

fault("K", "ratio prob_ratio", "ratio-level", on="gspo/mbs4", place="step0/rank0/micro0", tokens="all")(
    met_in("TRL#5814")(ratio_of_sums)
)


@fault("K", "ratio prob_ratio", "ratio-inverted")
@met_in("old and new log-probs exchanged")
@around(token_losses, "importance_ratio")
def ratio_inverted(right, *args):
    """The ratio is p_old / p in place of p / p_old."""
    return 1.0 / right(*args)


fault(
    "K",
    "token_loss elementwise_loss",
    "term-left-out",
    on="dr_grpo/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
)(met_in("an entropy bonus that is added to the loss")(entropy_bonus_reversed))

fault("K", "policy_loss policy_loss", "clip-range")(
    met_in("RLinf#316: a configured constant that does not arrive")(clip_range_off)
)

fault("J", "token_loss elementwise_loss", "coefficient token-loss")(
    met_in("a coefficient that is rounded on its way")(coefficients_off)
)


@fault("K", "policy_loss policy_loss", "clip-left-out")
@met_in("GMPO#4")
@in_place_of(ObjectiveFields, "clip_range")
def ratio_not_clipped(_):
    return (0.0, 1e9)


def policy_loss(patch, change):
    """Replace the policy loss by ``change(log_probs, ratio, advantages, objective)``."""
    patch.setattr(token_losses, "_policy_loss", lambda *args: change(*args[:4]))


def kl_with(patch, **changed):
    """Estimate the divergence by an objective with other fields."""
    right = kl_estimate
    patch.setattr(token_losses, "kl_estimate", lambda p, q, o: right(p, q, replace(o, **changed)))


LOSS = "policy_loss policy_loss"


@fault("J", "kl kl", "kl-direction", tokens="all")
@met_in("KL(reference, policy) in place of KL(policy, reference)")
@around(token_losses, "kl_estimate")
def kl_direction_reversed(right, p, q, objective):
    """Policy and reference are exchanged in the divergence."""
    return right(q, p, objective)


@fault("J", "kl kl", "kl")
@met_in("verl: a clamp of the log-ratio")
def kl_clamped(patch):
    """The log-ratio of the divergence is clamped at 0.1."""
    kl_with(patch, kl_log_ratio_clamp=0.1)


@fault("J", "kl kl", "kl")
@met_in("TRL PR#4638")
@around(token_losses, "_kl")
def kl_times_the_ratio(right, p, q, ratio, objective):
    """The importance correction of DeepSeek-V3.2, which this objective has not."""
    return right(p, q, ratio, replace(objective, kl_bias_correction=True))


@fault("J", "kl kl", "kl-estimator", tokens="all")
@met_in("k2 in place of k3")
def kl_of_the_squared_estimator(patch):
    """k2 replaces k3."""
    kl_with(patch, kl_estimator="k2")


@fault("J", "token_loss elementwise_loss", "term-left-out", tokens="all")
@met_in("a coefficient that does not arrive")
@around(token_losses, "_total")
def kl_left_out(right, policy, kl, entropy, o):
    """The divergence is computed, and does not enter the loss."""
    return right(policy, None, entropy, o)


@fault("J", "token_loss elementwise_loss", "term-left-out", tokens="all")
@met_in("a divergence that is taken off the loss")
@around(token_losses, "_total")
def kl_subtracted(right, policy, kl, entropy, objective):
    """The divergence is rewarded."""
    return right(policy, None if kl is None else -kl, entropy, objective)


@fault("K", LOSS, "one-sign policy-loss clip-range")
@met_in("tianshou#433")
@in_place_of(token_losses, "_dual_clip")
def dual_clip_for_every_sign(policy, advantages, objective):
    """The loss is capped at 1.1 times the size of the advantage, also where that is positive."""
    cap = 1.1 * advantages.abs()
    return policy.clamp(-cap, cap), policy.abs() > cap


@fault("K", "ratio prob_ratio", "ratio-inverted", tokens="all")
@met_in("Open-R1: 1 + log r")
@around(token_losses, "importance_ratio")
def ratio_not_exponentiated(right, *args):
    """The ratio is 1 plus its logarithm."""
    return 1.0 + right(*args).log()


@fault("K", LOSS, "clip-range")
@met_in("GMPO#4")
@by(policy_loss)
def logarithm_clipped(_, ratio, advantages, objective):
    """The clip range is that of the logarithm of the ratio: exp(0.2) in place of 1.2."""
    low, high = objective.clip_range
    clipped = ratio.clamp(math.exp(low - 1), math.exp(high - 1))
    return -torch.minimum(ratio * advantages, clipped * advantages)


@fault("K", LOSS, "maximum-for-minimum")
@met_in("a minimum that became a maximum with the sign of the loss")
@by(policy_loss)
def maximum_for_the_minimum(_, ratio, advantages, o):
    """The larger of the two terms is taken."""
    return -torch.maximum(ratio * advantages, ratio.clamp(*o.clip_range) * advantages)


@fault("K", LOSS, "clip-alone")
@met_in("a loss without the unclipped term")
@by(policy_loss)
def clipped_term_alone(_, ratio, advantages, o):
    """The minimum is not taken: the clipped term is the loss."""
    return -ratio.clamp(*o.clip_range) * advantages


@fault("A", LOSS, "loss-without-ratio")
@met_in("Liger-Kernel#1082, TRL PR#5031")
@by(policy_loss)
def ratio_left_out(log_probs, _, advantages, __):
    """A fused kernel ignores the importance ratio: the loss is the advantage times the log-prob."""
    return -log_probs * advantages


@fault("K", LOSS, "loss-sign", tokens="")
@met_in("a loss that is maximized")
@around(token_losses, "_policy_loss")
def policy_loss_reversed(right, *args):
    """The sign of the policy loss is turned."""
    return -right(*args)


@fault("K", "ratio prob_ratio", "ratio ratio-level", on="gspo/mbs4")
@met_in("EasyR1 PR#596, ms-swift PR#6548")
@in_place_of(token_losses, "importance_ratio")
def ratio_over_the_padded_length(log_probs, old, sequence, count, _, *__):
    """The mean of a sample's log-ratios divides by the longest completion of the microbatch."""
    lengths = segment_lengths(sequence, count)
    total = segment_sum(log_probs - old, sequence, count) / lengths.max().clamp(min=1)
    return torch.exp(total[sequence])


@fault("K", "ratio prob_ratio", "ratio-level", on="gspo/mbs4")
@met_in("TRL: token ratios for GSPO")
@around(token_losses, "importance_ratio")
def ratio_of_tokens(right, *args):
    """Each token has its own ratio, and the sample should have one."""
    return right(*args[:4], replace(args[4], importance_level="token"), *args[5:])


@fault("K", "policy_loss policy_loss", "policy-loss", on="dppo_kl/base", update=1)
@met_in("a radius of the trust region that is that of another distance")
def radius_of_the_trust_region_halved(patch):
    """DPPO trusts tokens up to half of its bounds."""
    right = policy_losses.trusted

    def wrong(tokens, o):
        return right(tokens, replace(o, clip_low=o.clip_low / 2, clip_high=o.clip_high / 2))

    patch.setattr(policy_losses, "trusted", wrong)


@fault(
    "K",
    "metrics training_step/clip_ratio/low",
    "mask-of-the-loss",
    on="dppo_kl/base",
    update=1,
    blind=EVERY_CHECK,
)
@met_in("a radius of the trust region that is that of another distance")
def lower_radius_of_the_trust_region_halved(patch):
    """DPPO trusts tokens down to half of its lower bound, where another mask leaves out those beyond."""
    right = policy_losses.trusted

    def wrong(tokens, o):
        return right(tokens, replace(o, clip_low=o.clip_low / 2))

    patch.setattr(policy_losses, "trusted", wrong)
