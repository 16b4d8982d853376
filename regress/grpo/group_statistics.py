"""Statistics of the samples that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.segment_sums import segment_sum


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's own group, shape [N]; ``std`` is 0 where it has no degrees of freedom.

    Samples of NaN count in none of them, and ``count`` leaves them out.
    """

    mean: Tensor
    std: Tensor
    count: Tensor
    constant: Tensor


def group_statistics(rewards_N: Tensor, groups_N: Tensor, ddof: int) -> GroupStatistics:
    """Return mean, standard deviation and size of each sample's group, and whether all its rewards are equal."""
    index = torch.unique(groups_N, return_inverse=True)[1]
    total = int(index.max()) + 1
    known = ~rewards_N.isnan()
    values, own = rewards_N[known], index[known]
    count = torch.bincount(own, minlength=total)
    mean = segment_sum(values, own, total) / count
    square = segment_sum((values - mean[own]).square(), own, total)
    std = (square / (count - ddof).clamp(min=1)).sqrt()
    first = torch.zeros_like(mean).scatter(0, own, values)
    differs = segment_sum((values != first[own]).double(), own, total)
    return GroupStatistics(mean[index], std[index], count[index], differs[index] == 0)
