"""Rewards before they become advantages: several functions, missing values, bounds. All in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError
from regress.grpo.fields import ObjectiveFields
from regress.grpo.group_statistics import group_statistics


def weights_of(rewards_NF: Tensor, weights: Sequence[float] | None) -> Tensor:
    """Return the weights of the reward functions, float64 of shape [F]; 1 each by default.

    Raises:
        InputError: if there are not as many weights as reward functions.
    """
    count = rewards_NF.shape[1]
    if weights is not None and len(weights) != count:
        raise InputError(f"""reward_weights has {len(weights)} values where rewards_N has {count} columns: give each
        reward function one.""")
    return torch.tensor(weights or [1.0] * count, dtype=torch.float64, device=rewards_NF.device)


def combined_rewards(rewards_NF: Tensor, weights_F: Tensor, objective: ObjectiveFields) -> Tensor:
    """Return the weighted sum of each sample's rewards, within the objective's bounds, shape [N].

    Missing ones (NaN) count as 0 beside others; a sample without any is NaN. Source: TRL 1.16
    ``GRPOTrainer._generate_and_score_completions`` (sum_then_normalize) and ``RLOOTrainer`` (reward_clip_range).
    """
    total = (rewards_NF * weights_F).nansum(1)
    total = total.masked_fill(rewards_NF.isnan().all(1), torch.nan)
    if objective.reward_min is None and objective.reward_max is None:
        return total
    return total.clamp(objective.reward_min, objective.reward_max)


def normalized_sum(
    rewards_NF: Tensor, weights_F: Tensor, groups_N: Tensor, objective: ObjectiveFields
) -> Tensor:
    """Return advantages of rewards that are normalized one by one in their groups, summed, and normalized again.

    Each function: ``(r - mean) / (std + eps)`` over its group; their weighted sum likewise over the batch. Missing
    values are left out of every statistic; a sample without any reward is NaN. Source: GDPO, arXiv 2601.05242, as in
    TRL 1.16 ``multi_objective_aggregation="normalize_then_sum"``.
    """
    columns = []
    for rewards in rewards_NF.unbind(1):
        group = group_statistics(rewards, groups_N, objective.ddof)
        centred = (rewards - group.mean).masked_fill(group.constant & ~rewards.isnan(), 0.0)
        columns.append(quotient(centred, group.std + objective.eps))
    total = combined_rewards(torch.stack(columns, 1), weights_F, ObjectiveFields())
    total = total.masked_fill(rewards_NF.isnan().all(1), torch.nan)
    return normalized(total, objective)


def normalized(values_N: Tensor, objective: ObjectiveFields) -> Tensor:
    """Return ``(x - mean) / (std + eps)`` over the batch, NaN left out; 0 where all are equal."""
    known = values_N[~values_N.isnan()]
    if known.numel() == 0 or bool((known == known[0]).all()):
        return torch.where(values_N.isnan(), values_N, torch.zeros_like(values_N))
    return (values_N - known.mean()) / (deviation(known, objective.ddof) + objective.eps)


def deviation(values: Tensor, ddof: int) -> Tensor:
    """Return the standard deviation; NaN is left out, and with too few values it is 0."""
    known = values[~values.isnan()]
    return ((known - known.mean()).square().sum() / max(known.numel() - ddof, 1)).sqrt()


def quotient(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values / scale``, and 0 for 0: a scale of 0 (eps 0, no variance) has nothing to divide."""
    return torch.where(values == 0, values, values / scale)
