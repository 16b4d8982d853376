"""Advantages and losses of a critic, as functions of values that somebody else computed."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError, check_finite, check_same_length
from regress.grpo.discounted_returns import padded, positions, whiten
from regress.grpo.fields import ObjectiveFields


def gae(
    rewards_K: Tensor, values_K: Tensor, sequence_K: Tensor, objective: ObjectiveFields
) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and returns of each token, [K] each.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` over the loss tokens of a sample,
    where the value after the last is 0; returns are ``A + V`` before whitening. Source: arXiv 1506.02438, eq. 16; verl
    0.9 ``compute_gae_advantage_return``.
    """
    count = int(sequence_K.max()) + 1 if len(sequence_K) else 0
    position_K = positions(sequence_K, count)
    rewards, values = (
        padded(each, sequence_K, position_K, count) for each in (rewards_K.double(), values_K.double())
    )
    advantages = torch.zeros_like(rewards)
    following = rewards.new_zeros(count)
    later = rewards.new_zeros(count)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + objective.gamma * following - values[:, t]
        later = delta + objective.gamma * objective.lam * later
        advantages[:, t], following = later, values[:, t]
    advantages_K = advantages[sequence_K, position_K]
    return whiten(advantages_K, objective), advantages_K + values_K.double()


def value_loss(
    values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped squared error of each value, and where the clipped one is the greater; [K] each.

    ``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2``, differentiable in ``values_K``; aggregate it
    with `regress.grpo.loss_aggregation.token_weights`. Source: verl 0.9 ``compute_value_loss``.

    Raises:
        InputError: shapes that do not match, values that are not finite, or a negative clip.
    """
    if not clip >= 0.0:
        raise InputError(f"clip={clip} is not a distance: give a number of at least 0.")
    check_same_length(values_K=values_K, old_values_K=old_values_K, returns_K=returns_K)
    for name, each in (("values_K", values_K), ("old_values_K", old_values_K), ("returns_K", returns_K)):
        check_finite(name, each)
    old_K, returns_K = old_values_K.detach(), returns_K.detach()
    free = (values_K - returns_K).square()
    clipped = (values_K.clamp(old_K - clip, old_K + clip) - returns_K).square()
    return 0.5 * torch.maximum(free, clipped), (clipped > free).detach()
