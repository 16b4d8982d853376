"""Samples that the loss tokens of a batch or microbatch belong to, and sums over each."""

# ruff: noqa: N815  (the suffix of a field is its shape)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.segment_sums import SumOverContextParallel, alone, segment_lengths, segment_sum


@dataclass(frozen=True)
class Samples:
    """Whole samples, or parts of samples whose other parts lie on other processes.

    Attributes:
        sequence_K: index of each token's sample, non-decreasing.
        count: samples, those without tokens included.
        complete: adds up what the processes hold of the same samples.
    """

    sequence_K: Tensor
    count: int
    complete: SumOverContextParallel = alone

    def sum(self, values_K: Tensor) -> Tensor:
        """Return the sum of a sample's values at each of its tokens, [K]."""
        return self.complete(segment_sum(values_K, self.sequence_K, self.count))[self.sequence_K]

    def mean(self, values_K: Tensor) -> Tensor:
        """Return the mean of a sample's values at each of its tokens, [K]."""
        total = self.complete(segment_sum(values_K, self.sequence_K, self.count))
        lengths = self.complete(segment_lengths(self.sequence_K, self.count)).clamp(min=1)
        return (total / lengths)[self.sequence_K]

    def maximum(self, values_K: Tensor) -> Tensor:
        """Return the greatest of a sample's values at each of its tokens, [K]; samples must be whole."""
        greatest = values_K.new_full((self.count,), -torch.inf)
        return greatest.scatter_reduce(0, self.sequence_K, values_K, "amax")[self.sequence_K]
