"""Discounted returns of tokens, and whitening over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.fields import ObjectiveFields
from regress.grpo.reward_combination import deviation
from regress.grpo.segment_sums import segment_lengths


def positions(sequence_K: Tensor, num_sequences: int) -> Tensor:
    """Return the number of each token within its sample, from 0; int64 of shape [K]."""
    lengths = segment_lengths(sequence_K, num_sequences)
    return torch.arange(len(sequence_K), device=sequence_K.device) - (lengths.cumsum(0) - lengths)[sequence_K]


def padded(values_K: Tensor, sequence_K: Tensor, position_K: Tensor, num_sequences: int) -> Tensor:
    """Return the values as ``[N, longest]``, each at its position, 0 elsewhere."""
    width = int(position_K.max()) + 1 if len(position_K) else 0
    rows = values_K.new_zeros(num_sequences, width)
    rows[sequence_K, position_K] = values_K
    return rows


def returns_of(rewards_K: Tensor, sequence_K: Tensor, gamma: float, num_sequences: int) -> Tensor:
    """Return the discounted sum of the rewards of a sample from each token on, [K]."""
    position_K = positions(sequence_K, num_sequences)
    rows = padded(rewards_K, sequence_K, position_K, num_sequences)
    for t in range(rows.shape[1] - 2, -1, -1):
        rows[:, t] += gamma * rows[:, t + 1]
    return rows[sequence_K, position_K]


def whiten(values_K: Tensor, objective: ObjectiveFields) -> Tensor:
    """Return (x - mean) / sqrt(variance + whiten_eps) over all tokens; 0 if they are all equal."""
    if values_K.numel() == 0 or bool((values_K == values_K[0]).all()):
        return torch.zeros_like(values_K)
    variance = deviation(values_K, objective.ddof).square()
    return (values_K - values_K.mean()) * torch.rsqrt(variance + objective.whiten_eps)
