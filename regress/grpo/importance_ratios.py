"""Importance ratios of policy to old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.fields import ObjectiveFields
from regress.grpo.fields.loss_fields import IMPORTANCE_LEVELS, SEQUENCE_GRADIENTS
from regress.grpo.objective_checks import check_choice
from regress.grpo.sampler_corrections import sampler_weights as sampler_weights
from regress.grpo.segment_sums import SumOverContextParallel, alone, segment_lengths, segment_sum


def importance_ratio(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    sequence_K: Tensor,
    num_sequences: int,
    objective: ObjectiveFields,
    sum_over_context_parallel: SumOverContextParallel = alone,
) -> Tensor:
    """Return the ratio r of each token, shape [K], differentiable; exactly 1 where the log-probs are equal.

    Token level: exp(log p - log p_old). ``sequence`` (GSPO, arXiv 2507.18071, eq. 7): exp of its mean over
    the sample; ``sequence_product``: exp of its sum. With ``sequence_gradient="token"``
    (GSPO-token in the same paper; verl) the sample's ratio is the value, and the gradient reaches the token's
    own log-prob only. ``sum_over_context_parallel`` completes the sums of samples whose tokens lie on several
    processes.
    """
    check_choice("importance_level", objective.importance_level, IMPORTANCE_LEVELS)
    check_choice("sequence_gradient", objective.sequence_gradient, SEQUENCE_GRADIENTS)
    log_ratio_K = log_probs_K - old_log_probs_K.detach()
    if objective.importance_level != "token":
        total = sum_over_context_parallel(segment_sum(log_ratio_K, sequence_K, num_sequences))
        if objective.importance_level == "sequence":
            total = total / sum_over_context_parallel(segment_lengths(sequence_K, num_sequences)).clamp(min=1)
        log_ratio_K = total[sequence_K]
        if objective.sequence_gradient == "token":
            log_ratio_K = log_probs_K - log_probs_K.detach() + log_ratio_K.detach()
    if objective.log_ratio_min is not None or objective.log_ratio_max is not None:
        log_ratio_K = log_ratio_K.clamp(objective.log_ratio_min, objective.log_ratio_max)
    return torch.exp(log_ratio_K)
