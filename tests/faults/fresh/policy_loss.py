"""Faults of ratios, clips and weights in the policy loss."""

import math
from dataclasses import replace

import torch

from regress.dump.taps import receiving
from regress.engine.grpo_trainer import Trainer
from regress.grpo import policy_losses, sampler_corrections, token_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import LOG_PROB_CHECKS, fault, met_in


@fault("K", "ratio prob_ratio", "ratio-of-a-part ratio", on="gspo/cp2-zigzag-packed-mbs4")
@met_in("EasyR1 PR#596, ms-swift PR#6548: one of two sums over context-parallel ranks")
@around(token_losses, "importance_ratio")
def mean_over_the_length_on_the_rank(right, new, old, sequence, count, objective, complete):
    """Log-ratios of a sample are summed over ranks, and divided by the number of its tokens on this one."""

    def of_sums(values):
        return complete(values) if values.is_floating_point() else values

    return right(new, old, sequence, count, objective, of_sums)


# names its formula and its clamps
@fault("K", "ratio prob_ratio", "ratio", on="gspo/reversed")
@met_in("GMPO's clip of tokens in a GSPO ratio")
@around(token_losses, "importance_ratio")
def tokens_clipped_before_their_mean(right, new, old, sequence, count, objective, *rest):
    """The log-ratio of each token is held within the clip range before the mean of the sample is taken."""
    low, high = objective.clip_range
    held = (new - old.detach()).clamp(math.log(low), math.log(high))
    return right(old.detach() + held, old, sequence, count, objective, *rest)


# names its normalization
@fault("K", "sampler_weights sampler_weights", "sampler-mismatch", on="cispo/packed-mbs3")
@met_in("verl: rollout_is_batch_normalize within each microbatch")
@around(token_losses, "_correction")
def sampler_weights_normalized_in_each_microbatch(right, *args):
    """The sampler's weights are divided by their mean over the microbatch, and should not be normalized at all."""
    found = right(*args)
    return None if found is None else found / found.mean()


# names its constants
@fault(
    "K",
    "policy_loss policy_loss",
    "clip-bound clip-range policy-loss precision",
    kind="precision",
    on="dense/packed",
)
@met_in("bounds of a clip as tensors of the model's dtype")
@around(ObjectiveFields, "clip_range")
def bounds_of_the_clip_in_bfloat16(right, objective):
    """The bounds that clip the ratio are rounded to half precision, the ratio is not."""
    low, high = (float(torch.tensor(bound).bfloat16()) for bound in right(objective))
    return low, high


LOWER = 0.9
"""Lower bound of a symmetric clip range around 1, the upper one being that of the golden case."""


@fault(
    "K",
    "policy_loss policy_loss",
    "clip-bound clip-range policy-loss inputs-hold",
    on="cispo/packed-mbs3",
    update=1,
)
@met_in("CISPO with the clip range of PPO: the lower bound is not switched off")
@in_place_of(policy_losses, "cispo")
def weights_bounded_from_below(t, o):
    """The weight of a token is at least 0.9, and should have no lower bound."""
    low, high = o.clip_range
    return -t.ratio.clamp(max(low, LOWER), high).detach() * t.advantages * t.log_probs


# names the other way round of truncation and mask
@fault("K", "sampler_weights sampler_weights", "sampler-mismatch inputs-hold", on="cispo/reversed")
@met_in("a mask (IcePop) in place of truncated importance sampling")
@around(sampler_corrections, "_bounded_weights")
def weights_beyond_their_bound_dropped(right, old, sampler, samples, objective):
    """Tokens whose weight for the sampler exceeds its bound are left out, and should count by the bound."""
    level, _, _ = objective.sampler_correction.partition("_")
    return right(old, sampler, samples, replace(objective, sampler_correction=f"{level}_mask"))


@fault("K", "sampler_weights", "sampler-mismatch", on="on_policy/cp2-zigzag-packed-mbs4")
@met_in("a product over a sample's tokens that context parallelism does not complete")
@around(token_losses, "sampler_weights")
def correction_of_own_columns(right, policy, sampler, sequence, count, objective, *_):
    """The sampler's weight of a sample is the product over its tokens on this rank."""
    return right(policy, sampler, sequence, count, objective)


@fault("K", "ratio prob_ratio", "ratio ratio-level", on="gspo/dp2-packed-mbs3", ranks=(0, 1))
@met_in("ms-swift PR#6548: a ratio that is broadcast over a packed row")
@around(token_losses, "importance_ratio")
def ratio_of_the_packed_row(right, new, old, sequence, *rest):
    """All samples of a packed row share one ratio: that of the mean over all its tokens."""
    return right(new, old, torch.zeros_like(sequence), *rest)


@fault("K", "old_log_probs old_log_probs", "old-is-current old-log-probs", on="dapo/mbs4", update=2)
@met_in("old log-probs that every epoch computes anew")
def old_log_probs_of_each_epoch(patch):
    """When the second epoch begins, the log-probs of the rollout are computed again by the policy of that time."""
    known = {}

    def wrong(right, self, mini):
        work = self.unfinished
        made = len(work.outcomes)
        if made % len(work.minis) == 0:
            known.clear()
            for one in work.minis if made else ():
                with receiving(None):
                    known[id(one)] = self._collected(self.policy, one.microbatches, len(one.tokens))
        if id(mini) in known:
            mini = replace(mini, tokens=replace(mini.tokens, old_log_probs=known[id(mini)]))
        return right(self, mini)

    patch.around(Trainer, "_train_step", wrong)


LOSS = "policy_loss policy_loss"


@fault("K", LOSS, "clip-range clip-left-out policy-loss", on="dppo_tv/base", blind=("mean 1e-3",))
@met_in("RLinf#316: a constant that **kwargs swallow")
@around(token_losses, "_policy_loss")
def delta_does_not_arrive(right, *args):
    """The weight of a token is the ratio itself, however large: the bound delta is not passed on."""
    *first, objective, inputs = args
    return right(*first, replace(objective, delta=None), inputs)


@fault("K", LOSS, "clip-range one-sign policy-loss", on="trl/base", blind=LOG_PROB_CHECKS)
@met_in("RLinf#316")
@in_place_of(token_losses, "_dual_clip")
def dual_clip_does_not_arrive(loss, *_):
    """Losses of disliked tokens have no cap: the dual clip is not passed on."""
    return (loss, torch.zeros_like(loss, dtype=torch.bool))


@fault("K", "ratio prob_ratio", "ratio")
@met_in("verl: a clamp of the negative approximate KL before exp")
@around(token_losses, "importance_ratio")
def logarithm_of_the_ratio_clamped(right, *args):
    """The logarithm of the ratio is held within 0.1 before it is exponentiated."""
    *first, objective, complete = args
    return right(*first, replace(objective, log_ratio_min=-0.1, log_ratio_max=0.1), complete)


@fault("K", LOSS, "policy-loss", on="sapo/base", blind=("mean 1e-3",))
@met_in("arguments of one type in another order")
@around(policy_losses, "sapo")
def temperatures_of_the_signs_exchanged(right, t, o):
    """Liked tokens have the temperature of disliked ones, and the reverse."""
    return right(t, replace(o, sapo_tau_pos=o.sapo_tau_neg, sapo_tau_neg=o.sapo_tau_pos))


@fault("K", LOSS, "clip-range clip-bound policy-loss", on="cispo_kl/base", steps=None, blind=LOG_PROB_CHECKS)
@met_in("MiniMax-M1: only the upper bound is used there")
@in_place_of(policy_losses, "cispo")
def lower_bound_left_out(t, o):
    """The weight of a token is bounded from above alone."""
    return -t.ratio.clamp(max=o.clip_range[1]).detach() * t.advantages * t.log_probs


@fault("K", LOSS, "clip-alone clip-range policy-loss", on="geo_mean/base", steps=None)
@met_in("GMPO#4")
@in_place_of(policy_losses, "geo_mean")
def clipped_whatever_the_sign(t, o):
    """The log-ratio is clipped on both sides, not on the one that the sign of the advantage makes pessimistic."""
    clipped = t.log_ratio.clamp(-o.clip_low, o.clip_high)
    return -t.samples.mean(t.advantages) * torch.exp(t.samples.mean(clipped))


# in dppo_tv it gives what clip_low=0 gives, at every token
@fault("K", LOSS, "policy-loss clip-range", on="dppo_kl/base", update=1, steps=None)
@met_in("a trust region of ratios in place of one of probabilities")
@in_place_of(policy_losses, "trusted")
def trust_region_of_the_ratio(t, o):
    """A token is trusted while its ratio, not its probability, is near."""
    gap = t.ratio.detach() - 1.0
    return torch.where(t.advantages > 0, gap <= o.clip_high, gap >= -o.clip_low).to(gap.dtype)


@fault("K", LOSS, "policy-loss", on="cispo_kl/base")
@met_in("DeepSeek-V3.2: a mask for negative advantages")
@around(token_losses, "_on_policy")
def mask_for_the_wrong_sign(right, log_probs, given, objective):
    """Samples far from the policy are left out where their advantage is positive, not where it is negative.

    Case dppo_kl, which masks by the same rule, cannot show it in its loss: the correction by sequences gives each
    sample beyond the threshold a weight of 0 already.
    """
    return right(log_probs, replace(given, advantages=-given.advantages), objective)


@fault("K", "ratio prob_ratio", "ratio ratio-level", on="gspo/mbs4")
@met_in("EasyR1 PR#596, Soup#723")
@in_place_of(token_losses, "importance_ratio")
def prompt_counted_in_the_mean(log_probs, old, sequence, count, *_):
    """The mean of a sample's log-ratios divides by four tokens of the prompt, too."""
    lengths = segment_lengths(sequence, count) + 4
    return torch.exp((segment_sum(log_probs - old, sequence, count) / lengths)[sequence])
