"""Sums and lengths per sample over flat loss tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

SumOverContextParallel = Callable[[Tensor], Tensor]
"""Sum of a tensor over the processes that each hold part of the same samples, on all of them; differentiable."""


def alone(values: Tensor) -> Tensor:
    """Return the values unchanged: the `SumOverContextParallel` of a process that holds whole samples."""
    return values


def segment_sum(values_K: Tensor, sequence_K: Tensor, num_sequences: int) -> Tensor:
    """Return the sum of ``values_K`` per sample, shape [N]; 0 for samples without tokens. Differentiable.

    A sample's tokens are added in order, so its sum does not depend on which other samples are present.
    """
    return values_K.new_zeros(num_sequences).index_add(0, sequence_K, values_K)


def segment_lengths(sequence_K: Tensor, num_sequences: int) -> Tensor:
    """Return the number of tokens per sample, int64 of shape [N]."""
    return torch.bincount(sequence_K, minlength=num_sequences)
