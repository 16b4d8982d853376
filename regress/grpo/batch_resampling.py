"""Choice of the samples that a batch is trained on: dynamic sampling, and resampling by reward."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.argument_checks import check_rewards
from regress.grpo.objective_checks import check_choice

PF_PPO_METHODS = ("pow", "max_min", "max_random")
LEAST = 1e-8
"""Added to every weight, so that each sample can be drawn."""


def varied_groups(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return which samples belong to a group whose rewards differ, or are alone in theirs; bool of shape [N].

    The others have no advantage, so dynamic sampling replaces them by samples of further prompts. Source: DAPO, arXiv
    2503.14476, eq. 11; verl 0.9 ``algorithm.filter_groups``.
    """
    check_rewards(rewards_N, groups_N)
    index = torch.unique(groups_N, return_inverse=True)[1]
    count = torch.bincount(index)
    least = rewards_N.new_full(count.shape, torch.inf).scatter_reduce(0, index, rewards_N, "amin")
    most = rewards_N.new_full(count.shape, -torch.inf).scatter_reduce(0, index, rewards_N, "amax")
    return ((most > least) | (count == 1))[index]


def resampling_weights(rewards_N: Tensor, method: str, power: float = 2.0) -> Tensor:
    """Return the weight with which each sample is drawn, with replacement, in place of the batch; shape [N].

    ``pow``: |R|^power; ``max_min``: 1 for the greatest and least rewards, 0 for others; ``max_random``: 0.4 for the
    greatest, 0.1 for others; `LEAST` is added. Draw with ``torch.multinomial(weights, N, replacement=True)``. Source:
    PF-PPO, arXiv 2409.06957; verl 0.9 ``compute_pf_ppo_reweight_data``.
    """
    check_choice("method", method, PF_PPO_METHODS)
    check_rewards(rewards_N, torch.zeros(len(rewards_N), dtype=torch.int64))
    if method == "pow":
        weights = rewards_N.abs() ** power
    elif method == "max_min":
        weights = ((rewards_N == rewards_N.max()) | (rewards_N == rewards_N.min())).to(rewards_N.dtype)
    else:
        weights = torch.where(rewards_N == rewards_N.max(), 0.4, 0.1).to(rewards_N.dtype)
    return weights + LEAST
