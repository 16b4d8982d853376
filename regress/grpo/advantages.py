"""Advantages of every loss token from one reward per sample.

Statistics are taken in float64 over a whole rollout batch, never over a microbatch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.checks import check_choice
from regress.grpo.inputs import check_finite, check_rewards, check_same_length, check_sequences
from regress.grpo.objective import ADVANTAGES, SCALES, SINGLE_SAMPLE_RULES, Objective
from regress.grpo.segments import segment_lengths, segment_sum


def token_advantages(
    rewards_N: Tensor,
    groups_N: Tensor,
    sequence_K: Tensor,
    objective: Objective,
    kl_penalty_K: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each loss token, shape [K], in the dtype of ``rewards_N``.

    Args:
        groups_N: group of each sample (samples of one prompt share it); any integers, in any order.
        groups_N: which samples share a prompt; any integers, in any order.
        kl_penalty_K: subtracted from the reward: summed over the sample, or from its token under
            ``reinforce_plus_plus`` (see `regress.grpo.kl.kl_penalty`).

    Raises:
        TaskError: a reward is not finite. InputError: shapes, order or values that cannot be used.
        ConfigError: an unknown estimator, scale or rule.

    Sources: grpo arXiv 2402.03300; scale=none arXiv 2503.20783; rloo arXiv 2402.14740;
    reinforce_plus_plus arXiv 2501.03262 (whitening over tokens as in verl).
    """
    _check(rewards_N, groups_N, sequence_K, objective, kl_penalty_K)
    rewards = rewards_N.detach().double()
    penalties = None if kl_penalty_K is None else kl_penalty_K.detach().double()
    if objective.advantage == "constant":
        return torch.ones_like(rewards_N)[sequence_K]
    if objective.advantage == "reinforce_plus_plus":
        returns_K = _token_returns(rewards, sequence_K, objective.gamma, penalties)
        return _whiten(returns_K, objective).to(rewards_N.dtype)
    if penalties is not None:
        rewards = rewards - segment_sum(penalties, sequence_K, rewards.numel())
    advantages_K = _sample_advantages(rewards, groups_N, objective)[sequence_K]
    if objective.advantage == "reinforce_plus_plus_baseline":
        advantages_K = _whiten(advantages_K, objective)
    return advantages_K.to(rewards_N.dtype)


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's own group, shape [N]; ``std`` is 0 where it has no degrees of freedom."""

    mean: Tensor
    std: Tensor
    count: Tensor
    constant: Tensor


def group_statistics(rewards_N: Tensor, groups_N: Tensor, ddof: int) -> GroupStatistics:
    """Return mean, standard deviation and size of each sample's group, and whether all its rewards are equal."""
    index = torch.unique(groups_N, return_inverse=True)[1]
    count = torch.bincount(index)
    mean = segment_sum(rewards_N, index, count.numel()) / count
    square = segment_sum((rewards_N - mean[index]).square(), index, count.numel())
    std = (square / (count - ddof).clamp(min=1)).sqrt()
    first = torch.zeros_like(mean).scatter(0, index, rewards_N)
    differs = segment_sum((rewards_N != first[index]).double(), index, count.numel())
    return GroupStatistics(mean[index], std[index], count[index], differs[index] == 0)


def _sample_advantages(rewards: Tensor, groups_N: Tensor, objective: Objective) -> Tensor:
    group = group_statistics(rewards, groups_N, objective.ddof)
    # exactly 0: divided by a standard deviation of its own size, the rounding error of the mean would not
    # be small
    centered = (rewards - group.mean).masked_fill(group.constant, 0.0)
    scale = torch.ones_like(rewards)
    if objective.advantage == "rloo":
        centered = centered * group.count / (group.count - 1).clamp(min=1)
    if objective.advantage != "reinforce_plus_plus_baseline" and objective.scale != "none":
        std = group.std if objective.scale == "group" else _std(rewards, objective.ddof).expand_as(rewards)
        alone_as_one = (group.count == 1) & (objective.single_sample == "raw")
        scale = std.masked_fill(alone_as_one, 1.0) + objective.eps
    alone = rewards if objective.single_sample == "raw" else torch.zeros_like(rewards)
    centered = torch.where(group.count == 1, alone, centered)
    # a scale of 0 (eps 0, no variance) has nothing to divide
    return torch.where(centered == 0, centered, centered / scale)


def _token_returns(rewards: Tensor, sequence_K: Tensor, gamma: float, penalties: Tensor | None) -> Tensor:
    """Return the discounted sum of rewards from each token on; the sample's own reward lies on its last token."""
    N, K = rewards.numel(), sequence_K.numel()
    if K == 0:
        return rewards.new_zeros(0)
    lengths = segment_lengths(sequence_K, N)
    position = torch.arange(K, device=sequence_K.device) - (lengths.cumsum(0) - lengths)[sequence_K]
    token_rewards = rewards.new_zeros(N, int(lengths.max()))
    if penalties is not None:
        token_rewards[sequence_K, position] = -penalties
    rows = torch.nonzero(lengths)[:, 0]
    token_rewards[rows, lengths[rows] - 1] += rewards[rows]
    for t in range(token_rewards.shape[1] - 2, -1, -1):
        token_rewards[:, t] += gamma * token_rewards[:, t + 1]
    return token_rewards[sequence_K, position]


def _whiten(values_K: Tensor, objective: Objective) -> Tensor:
    """Return (x - mean) / sqrt(variance + whiten_eps) over all tokens; 0 if they are all equal."""
    if values_K.numel() == 0 or bool((values_K == values_K[0]).all()):
        return torch.zeros_like(values_K)
    variance = _std(values_K, objective.ddof).square()
    return (values_K - values_K.mean()) * torch.rsqrt(variance + objective.whiten_eps)


def _std(values: Tensor, ddof: int) -> Tensor:
    return ((values - values.mean()).square().sum() / max(values.numel() - ddof, 1)).sqrt()


def _check(
    rewards_N: Tensor,
    groups_N: Tensor,
    sequence_K: Tensor,
    objective: Objective,
    kl_penalty_K: Tensor | None,
) -> None:
    check_choice("advantage", objective.advantage, ADVANTAGES)
    check_choice("scale", objective.scale, SCALES)
    check_choice("single_sample", objective.single_sample, SINGLE_SAMPLE_RULES)
    check_rewards(rewards_N, groups_N)
    check_sequences(sequence_K, rewards_N.numel())
    if kl_penalty_K is not None:
        check_same_length(sequence_K=sequence_K, kl_penalty_K=kl_penalty_K)
        check_finite("kl_penalty_K", kl_penalty_K)
