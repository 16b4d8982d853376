"""Refactorings of log-probs, loss and advantages."""

import torch
from torch.nn import functional

from regress.engine import causal_lm_policy as policy
from regress.engine import grpo_trainer, training_passes
from regress.grpo import advantage_estimators, importance_ratios, selective_log_softmax, token_losses
from regress.grpo.group_statistics import GroupStatistics
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.advantages import with_groups
from tests.faults.fault import harmless
from tests.faults.loss import policy_loss

EVERY = ("float64", "float32", "bfloat16")


def log_probs_by(patch, compute):
    """Compute log-probs and entropies by ``compute(logits, targets, temperature)`` of plain torch operations."""

    def other(logits, targets, *, temperature=1.0, entropy=False, **_):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_p = torch.log_softmax(wide / temperature, -1)
        own = -(log_p.exp() * log_p).sum(-1) if entropy else None
        if own is not None and entropy == "no_grad":
            own = own.detach()
        return TokenLogProbs(compute(wide, targets, temperature), own)

    patch.setattr(policy, "token_log_probs", other)


@harmless("H", precisions="float64 float32 bfloat16")
@by(log_probs_by)
def log_probs_by_log_softmax(logits, targets, t):
    """torch.log_softmax over the whole vocabulary, then the targets are picked."""
    return torch.log_softmax(logits / t, -1).gather(-1, targets[..., None])[..., 0]


@harmless("H", precisions="float64 float32 bfloat16")
@by(log_probs_by)
def log_probs_by_cross_entropy(logits, targets, t):
    """The negative cross entropy of each token."""
    return -functional.cross_entropy(logits / t, targets, reduction="none")


@harmless("H", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32 bfloat16")
@by(log_probs_by)
def log_probs_by_logsumexp(logits, targets, temperature):
    """The target's logit less the log-sum-exp of all."""
    scaled = logits / temperature
    return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)


@harmless("H", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32 bfloat16")
@around(policy, "token_log_probs")
def vocabulary_in_pieces(right, *args, **rest):
    """The log-sum-exp runs over pieces of eight columns."""
    return right(*args, **{**rest, "vocab_chunk": 8})


@harmless("H", on="dr_grpo/mbs4", precisions="float64 float32 bfloat16")
@around(policy, "token_log_probs")
def temperature_multiplied(right, logits, targets, *, temperature, **rest):
    """Logits are multiplied by the reciprocal of the temperature, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision rounds the product
    return right(wide * (1.0 / temperature), targets, **rest)


@harmless("R", precisions="float64 float32 bfloat16")
@around(selective_log_softmax, "logits_gradient")
def logits_gradient_by_softmax(right, logits, targets, stats, up, entropy, *rest):
    """The gradient of logits is made of one softmax, and a one-hot matrix."""
    if entropy is not None:
        return right(logits, targets, stats, up, entropy, *rest)
    wide = (logits.to(stats.dtype) / rest[0]).reshape(len(targets), -1)
    own = functional.one_hot(targets, wide.shape[-1]).to(wide.dtype) - wide.softmax(-1)
    return (own * (up.reshape(-1, 1).to(wide.dtype) / rest[0])).to(logits.dtype).view_as(logits)


@harmless("K", on="dense/mbs4 gspo/mbs4", precisions="float64 float32 bfloat16")
@around(token_losses, "importance_ratio")
def ratio_by_expm1(right, *args):
    """The ratio is 1 + expm1 of its logarithm."""
    return 1.0 + torch.expm1(right(*args).log())


@harmless("K", on="dense/mbs4 dapo/mbs4", precisions="float64 float32 bfloat16")
@by(policy_loss)
def loss_by_maximum(_, ratio, advantages, o):
    """max(-r A, -clip(r) A), as in PPO's first implementation."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(*o.clip_range))


@harmless("K", on="dense/mbs4 dapo/mbs4", precisions="float64 float32 bfloat16")
@by(policy_loss)
def loss_by_cases(_, ratio, advantages, objective):
    """The clip is written as two cases, by the sign of the advantage."""
    low, high = objective.clip_range
    held = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    return -(held * advantages)


@harmless("J", precisions="float64 float32 bfloat16")
@in_place_of(token_losses, "kl_estimate")
def kl_by_expm1(p, q, _):
    """k3 as expm1(x) - x."""
    gap = q - p
    return torch.expm1(gap) - gap


@harmless("J", precisions="float64 float32 bfloat16")
@in_place_of(token_losses, "kl_estimate")
def kl_of_the_ratio(p, q, _):
    """k3 as r - log r - 1 of the ratio of reference to policy."""
    ratio = torch.exp(q - p)
    return ratio - torch.log(ratio) - 1


@harmless("A", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32 bfloat16")
@in_place_of(token_losses, "_total")
def terms_in_another_order(policy, kl, entropy, o):
    """Entropy and KL are added up first."""
    rest = torch.zeros_like(policy) if kl is None else o.kl_coef * kl
    if o.entropy_coef and entropy is not None:
        rest = rest - o.entropy_coef * entropy
    return rest + policy


@harmless("A", precisions="float64 float32 bfloat16")
@in_place_of(grpo_trainer, "weigh")
def denominators_by_hand(tokens, *_, **__):
    """Weights of tokens are made sample by sample."""
    weights = torch.zeros(len(tokens), dtype=torch.float64)
    for sample in range(tokens.num_sequences):
        here = tokens.sequence == sample
        weights[here] = 1.0 / (tokens.num_sequences * max(int(here.sum()), 1))
    return weights


@harmless("I", on="dense/mbs4 dapo/mbs4", precisions="float64 float32 bfloat16")
@by(with_groups)
def groups_with_other_numbers(groups):
    """Groups are numbered otherwise."""
    return 1000 - 7 * groups


@harmless("I", precisions="float64 float32 bfloat16")
@in_place_of(advantage_estimators, "group_statistics")
def statistics_by_torch(rewards, groups, ddof):
    """Mean and deviation of each group by torch.mean and torch.std."""
    mean, std = torch.zeros_like(rewards), torch.zeros_like(rewards)
    count = torch.zeros_like(groups)
    constant = torch.zeros_like(groups, dtype=torch.bool)
    for group in groups.unique():
        here = groups == group
        own = rewards[here]
        mean[here], count[here] = own.mean(), len(own)
        std[here] = own.std(correction=ddof) if len(own) > ddof else 0.0
        constant[here] = bool((own == own[0]).all())
    return GroupStatistics(mean, std, count, constant)


@harmless("I", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32 bfloat16")
@around(grpo_trainer, "token_advantages")
def rewards_shifted_first(right, rewards, *rest):
    """The mean of all rewards is taken off before groups are looked at."""
    return right(rewards - rewards.mean(), *rest)


@harmless("K", on="gspo/mbs4", precisions="float64 float32 bfloat16")
@in_place_of(importance_ratios, "segment_sum")
def sums_of_samples_by_loop(values, sequence, count):
    """Sums over the tokens of a sample are taken sample by sample."""
    return torch.stack([values[sequence == sample].sum() for sample in range(count)])


@harmless("K", on="cispo/mbs4", precisions="float64 float32 bfloat16")
@in_place_of(token_losses, "sampler_weights")
def weights_by_division(policy, sampler, *rest):
    """The sampler's weight is a quotient of probabilities."""
    objective = rest[2]
    ratio = policy.detach().exp() / sampler.detach().exp()
    return ratio.clamp(objective.correction_min, objective.correction_max)


@harmless("A", precisions="float64 float32 bfloat16")
@in_place_of(training_passes, "_sum")
def loss_as_product(_, values):
    """A microbatch's share of the loss is a product of vectors."""
    return values @ torch.ones_like(values)
