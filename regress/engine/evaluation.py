"""Evaluation: the greedy pass rate on the held-out problems."""

from __future__ import annotations

from collections.abc import Sequence

from regress.engine.config.schema import Config
from regress.engine.rollout import VAL, Prompt, RolloutWorker

PASS_RATE = "eval_avg_test_pass_rate"


def pass_rate(worker: RolloutWorker, prompts: Sequence[Prompt], step: int) -> float:
    """Share of the prompts whose greedy completion is the right answer; failures of any kind count as 0."""
    trajectories = worker.rollout(step, prompts, VAL)
    return sum(t.rewards["exact_match"] for t in trajectories) / len(trajectories)


def due(config: Config, step: int) -> bool:
    """Whether the policy is evaluated after ``step`` steps: at first, at last, and every so many."""
    every = config.evaluation.every_n_steps
    return every > 0 and (step % every == 0 or step == config.max_steps)
