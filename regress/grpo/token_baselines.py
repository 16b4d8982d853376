"""Baselines of single tokens: the optimal token baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.discounted_returns import padded, positions
from regress.grpo.fields import ObjectiveFields

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
