"""Resampling of a rollout: how often each sample is drawn for the update, by its reward.

Source: PF-PPO, arXiv 2409.06957; verl 0.9 ``compute_pf_ppo_reweight_data``, which copies the rows drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.grpo.batch_resampling import resampling_weights
from regress.tasks.portable_draws import generator


def drawn_counts(trajectories: Sequence[Trajectory], config: Config) -> Tensor | None:
    """Return how often each sample is drawn, int64 of shape [N] and sum N; None without resampling.

    The draws depend on ``seed``, the samples' keys and their rewards alone, so that every rank, a resumed run and a
    replay make the same ones.
    """
    chosen = config.trainer
    if chosen.resampling == "none":
        return None
    rewards = torch.tensor([float(one.reward) for one in trajectories], dtype=torch.float64)
    weights = resampling_weights(rewards, chosen.resampling, chosen.resampling_power).tolist()
    bounds = list(accumulate(weights))
    rng = generator("resampling", config.seed, *(part for one in trajectories for part in one.key))
    counts = torch.zeros(len(trajectories), dtype=torch.int64)
    for _ in trajectories:
        counts[min(bisect_right(bounds, rng.random() * bounds[-1]), len(bounds) - 1)] += 1
    return counts
