"""Weights that turn token losses into one number."""

import torch
from torch import Tensor

from regress.grpo.checks import check_choice
from regress.grpo.inputs import InputError, check_sequences
from regress.grpo.objective import AGGREGATIONS, Objective
from regress.grpo.segments import segment_lengths


def token_weights(
    sequence_K: Tensor, num_sequences: int, objective: Objective, *, max_completion_length: int
) -> Tensor:
    """Return the weight of each loss token in ``loss = sum(weights_K * loss_K)``; float64, shape [K].

    Called once over a whole mini-batch (``denominator_scope="global"``), so that microbatches and ranks only
    add up their shares; or once per microbatch, divided by their number (``"microbatch"``).

    Args:
        num_sequences: samples in the batch, those without loss tokens included.
        max_completion_length: divisor of ``seq-mean-token-sum-norm``, unless the objective sets
            ``norm_length``.

    Sources, with n tokens in a sample, K tokens and N samples in all (or only those with tokens, if
    ``count_empty_rows`` is off): token-mean 1/K (DAPO, arXiv 2503.14476, eq. 8); seq-mean-token-mean 1/(N n)
    (GRPO, arXiv 2402.03300, eq. 3); seq-mean-token-sum 1/N; seq-mean-token-sum-norm 1/(N length)
    (Dr. GRPO, arXiv 2503.20783); token-sum 1. The names are verl's.
    """
    check_choice("aggregation", objective.aggregation, AGGREGATIONS)
    check_sequences(sequence_K, num_sequences)
    weights_K = torch.ones(sequence_K.numel(), dtype=torch.float64, device=sequence_K.device)
    if objective.aggregation == "token-sum":
        return weights_K
    if objective.aggregation == "token-mean":
        return weights_K / max(sequence_K.numel(), 1)
    lengths = segment_lengths(sequence_K, num_sequences)
    counted = num_sequences if objective.count_empty_rows else int((lengths > 0).sum())
    weights_K = weights_K / max(counted, 1)
    if objective.aggregation == "seq-mean-token-mean":
        return weights_K / lengths[sequence_K]
    if objective.aggregation == "seq-mean-token-sum-norm":
        return weights_K / _norm_length(objective, max_completion_length)
    return weights_K


def _norm_length(objective: Objective, max_completion_length: int) -> int:
    length = max_completion_length if objective.norm_length is None else objective.norm_length
    if length < 1:
        raise InputError(f"length {length} cannot divide a loss: set norm_length to at least 1.")
    return length
