"""Advantages of samples from their rewards, by the group they belong to. All in float64, shape [N].

Rewards of NaN are those of samples that nobody scored; they enter no statistic, and their advantage is NaN. The optimal
token baselines are those of single tokens, [K].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError
from regress.grpo.discounted_returns import padded, positions
from regress.grpo.fields import ObjectiveFields
from regress.grpo.group_statistics import GroupStatistics, group_statistics
from regress.grpo.reward_combination import deviation, quotient
from regress.grpo.segment_sums import segment_sum

EPS = 1e-8
"""Added to the sum of weights that divides a baseline."""


@dataclass(frozen=True)
class TokenVariance:
    """Values that the variance of a token's score is estimated from, [K] each.

    Attributes:
        log_probs: of the policy before the update.
        sum_pi_squared: sum of its squared probabilities over the vocabulary.
        weights: sampler correction weights, whose squares scale it; None: 1.
        positions: of the tokens in their completions; None: their number among the sample's loss tokens.
    """

    log_probs: Tensor
    sum_pi_squared: Tensor
    weights: Tensor | None = None
    positions: Tensor | None = None

    def of_tokens(self) -> Tensor:
        """Return ``1 - 2 p + sum of squared probabilities``, times the squared weight, [K]."""
        variance = 1.0 - 2.0 * self.log_probs.exp() + self.sum_pi_squared
        return variance if self.weights is None else variance * self.weights.double().square()


def optimal_token_baseline(
    rewards_K: Tensor,
    groups_N: Tensor,
    sequence_K: Tensor,
    variance: TokenVariance,
    objective: ObjectiveFields,
) -> Tensor:
    """Return the return of each token minus a baseline of its group and position, [K].

    The baseline is ``sum(W R) / sum(W)`` over the group's samples at the same position, W the variances up to there
    added up and R the undiscounted return. A group of one sample has none, nor, with ``otb_zero_tail``, the part of
    the longest sample beyond the second longest. Sources: verl 0.9 ``compute_optimal_token_baseline_advantage`` and,
    with positions that count loss tokens only, ``compute_multi_turn_optimal_token_baseline_advantage``.
    """
    N = len(groups_N)
    own = positions(sequence_K, N)
    place = own if variance.positions is None else variance.positions
    returns, weights, present = (
        padded(values, sequence_K, place, N)
        for values in (
            _from_each_on(rewards_K, sequence_K, own, N),
            _up_to(variance.of_tokens(), sequence_K, own, N),
            torch.ones_like(rewards_K),
        )
    )
    baselines = torch.zeros_like(returns)
    index = torch.unique(groups_N, return_inverse=True)[1]
    for group in range(int(index.max()) + 1):
        members = torch.nonzero(index == group)[:, 0]
        counted = members if variance.positions is not None else members[present[members].sum(1) > 0]
        if len(counted) < 2:
            continue
        shares = weights[counted] * present[counted]
        baselines[counted] = (shares * returns[counted]).sum(0) / (shares.sum(0) + EPS)
        if objective.otb_zero_tail:
            _drop_tail(baselines, present, counted)
    return (returns - baselines)[sequence_K, place]


def _drop_tail(baselines: Tensor, present: Tensor, members: Tensor) -> None:
    """Set the baselines of a group's longest sample to 0 at the columns from the second greatest length on."""
    lengths = present[members].sum(1)
    order = lengths.sort().values
    longest, second = int(order[-1]), int(order[-2])
    if longest > second:
        baselines[members[int(lengths.argmax())], second:] = 0.0


def _from_each_on(values_K: Tensor, sequence_K: Tensor, own: Tensor, N: int) -> Tensor:
    rows = padded(values_K, sequence_K, own, N)
    return rows.flip(1).cumsum(1).flip(1)[sequence_K, own]


def _up_to(values_K: Tensor, sequence_K: Tensor, own: Tensor, N: int) -> Tensor:
    return padded(values_K, sequence_K, own, N).cumsum(1)[sequence_K, own]


@dataclass(frozen=True)
class Scored:
    """Rewards of the samples of a batch, and what their advantages may depend on.

    Attributes:
        rewards: [N], NaN where nobody scored the sample.
        index: [N] number of each sample's group, from 0.
        group: statistics of each sample's group.
        lengths: [N] loss tokens of each sample.
    """

    rewards: Tensor
    index: Tensor
    group: GroupStatistics
    lengths: Tensor


def scored(
    rewards_N: Tensor,
    groups_N: Tensor,
    lengths_N: Tensor,
    objective: ObjectiveFields,
) -> Scored:
    """Return the rewards of a batch with the statistics of their groups."""
    index = torch.unique(groups_N, return_inverse=True)[1]
    return Scored(rewards_N, index, group_statistics(rewards_N, groups_N, objective.ddof), lengths_N)


def grpo(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return ``(R - mean) / (std + eps)``, the standard deviation as ``scale`` says (arXiv 2402.03300, 2503.20783)."""
    return _scaled(_centred(samples), samples, objective)


def rloo(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return ``(R - mean) n / (n - 1)``: the baseline is the mean of the others (arXiv 2402.14740)."""
    group = samples.group
    centred = _centred(samples) * group.count / (group.count - 1).clamp(min=1)
    return _scaled(centred, samples, objective)


def group_mean(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return ``R - mean`` without a scale, to be whitened (arXiv 2501.03262)."""
    return _alone(_centred(samples), samples, objective)


def opo(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return ``R - sum(n R) / sum(n)`` over the group, n the sample's loss tokens (arXiv 2505.23585, eq. 8).

    Without any loss token in the group the baseline is 0, and no token has an advantage.
    """
    lengths = samples.lengths.double().masked_fill(samples.rewards.isnan(), 0.0)
    total = int(samples.index.max()) + 1
    weighted = segment_sum(lengths * samples.rewards.nan_to_num(), samples.index, total)
    tokens = segment_sum(lengths, samples.index, total)
    baseline = (weighted / tokens.clamp(min=1.0))[samples.index]
    # the rounding error of a weighted mean of equal rewards is not an advantage
    even = samples.group.constant & (tokens > 0)[samples.index] & ~samples.rewards.isnan()
    return _alone((samples.rewards - baseline).masked_fill(even, 0.0), samples, objective)


def gpg(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return ``alpha (R - mean) / gpg_norm``, alpha = samples / samples of a reward other than 0 (arXiv 2504.02546)."""
    known = samples.rewards[~samples.rewards.isnan()]
    alpha = known.numel() / max(int(torch.count_nonzero(known)), 1)
    return alpha * _alone(_centred(samples), samples, objective) / objective.gpg_norm


def grpo_passk(samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return the best reward of the group minus the second best for its best sample, 0 for others (arXiv 2503.19595).

    Of equal ones the first is the best. Divided by the standard deviation as ``scale`` says.

    Raises:
        InputError: for a group of one sample, which has no second best.
    """
    if bool((samples.group.count < 2).any()):
        raise InputError("""groups_N has a group of one scored sample: advantage=grpo_passk needs a second best; give
        every prompt at least 2 samples.""")
    rewards = samples.rewards.nan_to_num(nan=-torch.inf)
    advantages = torch.zeros_like(rewards)
    for group in range(int(samples.index.max()) + 1):
        members = torch.nonzero(samples.index == group)[:, 0]
        own = rewards[members]
        best = int(own.argmax())
        others = own.clone()
        others[best] = -torch.inf
        advantages[members[best]] = own[best] - others.max()
    return _scaled(advantages, samples, objective).masked_fill(samples.rewards.isnan(), torch.nan)


def _centred(samples: Scored) -> Tensor:
    # exactly 0: divided by a standard deviation of its own size, the rounding error of the mean would not
    # be small
    even = samples.group.constant & ~samples.rewards.isnan()
    return (samples.rewards - samples.group.mean).masked_fill(even, 0.0)


def _alone(centred: Tensor, samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return the values, and those of the only sample of a group by the objective's rule."""
    alone = samples.rewards if objective.single_sample == "raw" else torch.zeros_like(samples.rewards)
    single = (samples.group.count == 1) & ~samples.rewards.isnan()
    return torch.where(single, alone, centred)


def _scaled(centred: Tensor, samples: Scored, objective: ObjectiveFields) -> Tensor:
    """Return the values over the standard deviation that ``scale`` names, plus eps."""
    scale = torch.ones_like(centred)
    if objective.scale != "none":
        group = samples.group
        whole = deviation(samples.rewards, objective.ddof).expand_as(centred)
        std = group.std if objective.scale == "group" else whole
        alone_as_one = (group.count == 1) & (objective.single_sample == "raw")
        scale = std.masked_fill(alone_as_one, 1.0) + objective.eps
    return quotient(_alone(centred, samples, objective), scale)
