"""Corrections for a sampler whose probabilities are not those of the policy: weights and rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.fields import ObjectiveFields
from regress.grpo.fields.correction_fields import SAMPLER_CORRECTIONS
from regress.grpo.objective_checks import check_choice
from regress.grpo.rejection_criteria import Criterion, criteria
from regress.grpo.segment_sums import SumOverContextParallel, alone, segment_lengths
from regress.grpo.token_samples import Samples

TINY = 1e-8
"""Least mean of weights that divides them."""


def sampler_weights(
    old_log_probs_K: Tensor,
    sampler_log_probs_K: Tensor,
    sequence_K: Tensor,
    num_sequences: int,
    objective: ObjectiveFields,
    sum_over_context_parallel: SumOverContextParallel = alone,
) -> Tensor:
    """Return the weight that corrects each token for its sampler; shape [K], no gradient.

    w = p_old / p_sampler, per token or multiplied over the sample; ``truncate`` clamps it to the bounds
    (truncated importance sampling), ``mask`` zeroes it outside of them (IcePop). A NaN log-prob of the
    sampler means "not known" and counts as no difference, as in TRL. ``correction_normalize`` divides by
    `mean_weight` of the tokens given.
    """
    weights_K = _bounded_weights(
        old_log_probs_K,
        sampler_log_probs_K,
        Samples(sequence_K, num_sequences, sum_over_context_parallel),
        objective,
    )
    if not objective.correction_normalize:
        return weights_K
    mean = mean_weight(weights_K, sequence_K, num_sequences, objective)
    return weights_K / mean if mean > TINY else weights_K


def mean_weight(
    weights_K: Tensor, sequence_K: Tensor, num_sequences: int, objective: ObjectiveFields
) -> float:
    """Return the mean weight over tokens or, for sequence weights, over the samples that have tokens.

    Source: verl 0.9 ``compute_rollout_correction_weights``, ``rollout_is_batch_normalize``.
    """
    wide = weights_K.double()
    if wide.numel() == 0:
        return 1.0
    if objective.sampler_correction.startswith("token"):
        return float(wide.mean())
    lengths = segment_lengths(sequence_K, num_sequences)
    return float((wide / lengths[sequence_K]).sum() / (lengths > 0).sum())


def _bounded_weights(
    old_K: Tensor, sampler_K: Tensor, samples: Samples, objective: ObjectiveFields
) -> Tensor:
    check_choice("sampler_correction", objective.sampler_correction, SAMPLER_CORRECTIONS)
    gap_K = log_gap(old_K, sampler_K)
    level, _, rule = objective.sampler_correction.partition("_")
    if level == "sequence":
        gap_K = samples.sum(gap_K)
    if objective.correction_log_clamp is not None:
        gap_K = gap_K.clamp(-objective.correction_log_clamp, objective.correction_log_clamp)
    weights_K = torch.exp(gap_K)
    low, high = objective.correction_min, objective.correction_max
    if rule == "truncate":
        return weights_K.clamp(low, high)
    outside = torch.zeros_like(weights_K, dtype=torch.bool)
    if low is not None:
        outside |= weights_K < low
    if high is not None:
        outside |= weights_K > high
    return weights_K.masked_fill(outside, 0.0)


def log_gap(policy_K: Tensor, sampler_K: Tensor) -> Tensor:
    """Return log p - log p_sampler of each token without gradient, 0 where the sampler's is not known (NaN)."""
    return torch.nan_to_num(policy_K.detach() - sampler_K.detach(), nan=0.0)


def accepted(
    policy_log_probs_K: Tensor, sampler_log_probs_K: Tensor, samples: Samples, objective: ObjectiveFields
) -> Tensor:
    """Return which tokens meet every criterion of rejection, bool of shape [K].

    Tokens that fail are left out: of the loss, its denominators and the advantages where the policy is the old one; of
    the policy loss alone where it is the current one. Source: verl 0.9 ``compute_rollout_rejection_mask``.
    """
    gap_K = log_gap(policy_log_probs_K, sampler_log_probs_K)
    if objective.correction_log_clamp is not None:
        gap_K = gap_K.clamp(-objective.correction_log_clamp, objective.correction_log_clamp)
    kept_K = torch.ones_like(gap_K, dtype=torch.bool)
    for criterion in criteria(objective.rejection or ""):
        divergence_K = _over(samples, criterion, _estimated(gap_K, criterion.estimator))
        kept_K &= (divergence_K >= criterion.low) & (divergence_K <= criterion.high)
    return kept_K


def _estimated(gap_K: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -gap_K
    return 0.5 * gap_K.square() if estimator == "k2" else torch.exp(gap_K) - 1.0 - gap_K


def _over(samples: Samples, criterion: Criterion, values_K: Tensor) -> Tensor:
    if criterion.level == "token":
        return values_K
    if criterion.level == "seq_sum":
        return samples.sum(values_K)
    return samples.mean(values_K) if criterion.level == "seq_mean" else samples.maximum(values_K)
