"""Rewards of samples as an objective takes them, and the KL of samples that adapts its coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.mini_batch import LossTokens
from regress.engine.rollout_worker import UNSCORED
from regress.errors import ReplayError
from regress.grpo.kl_divergence import kl_estimate
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.segment_sums import segment_lengths, segment_sum


def rewards_of(
    trajectories: Sequence[Trajectory], config: Config
) -> tuple[list[float] | list[list[float]], list[float] | None]:
    """Return the reward of each sample or, where the objective treats them one by one, each reward and their weights.

    Rewards of functions that left a sample out are NaN.

    Raises:
        ReplayError: if a trajectory has none of the rewards of ``task.rewards``.
    """
    objective = config.algorithm
    separate = ADVANTAGES[objective.advantage].separate
    if not separate and objective.reward_aggregation == "sum_then_normalize":
        return [math.nan if UNSCORED in one.extra else one.reward for one in trajectories], None
    weights = {name: float(weight) for name, weight in config.task.rewards.items() if weight}
    for trajectory in trajectories:
        if UNSCORED in trajectory.extra or any(name in trajectory.rewards for name in weights):
            continue
        lacking = [name for name in weights if name not in trajectory.rewards]
        if lacking:
            raise ReplayError(f"""sample {trajectory.key} has no reward {lacking[0]!r} of task.rewards, each of which
            the objective normalizes by itself; set algorithm.advantage=grpo and
            algorithm.reward_aggregation=sum_then_normalize""")
    missing = math.nan
    table = [[float(one.rewards.get(name, missing)) for name in weights] for one in trajectories]
    return table, list(weights.values())


def sample_kl(batches: Sequence[LossTokens], objective: Objective) -> tuple[float, int]:
    """Return the mean over samples of the mean KL of their tokens before the update, and the number of samples.

    Source: verl 0.9 ``apply_kl_penalty``; a sample without loss tokens counts as 0.
    """
    total, count = 0.0, 0
    for tokens in batches:
        assert tokens.old_log_probs is not None
        assert tokens.ref_log_probs is not None
        kl = kl_estimate(tokens.old_log_probs, tokens.ref_log_probs, objective).double()
        lengths = segment_lengths(tokens.sequence, tokens.num_sequences).clamp(min=1)
        total += float((segment_sum(kl, tokens.sequence, tokens.num_sequences) / lengths).sum())
        count += tokens.num_sequences
    return total / count, count
