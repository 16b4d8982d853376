"""Evaluation: greedy pass rate on the held-out problems."""

from __future__ import annotations

from collections.abc import Sequence

from regress.dump.trajectory import Trajectory
from regress.engine.config.schema import Config
from regress.engine.rollout import VAL, Prompt, RolloutWorker
from regress.errors import ReplayError
from regress.tasks.problem import is_correct

PASS_RATE = "eval_avg_test_pass_rate"


def pass_rate(worker: RolloutWorker, prompts: Sequence[Prompt], step: int) -> float:
    """Return the share of the prompts whose greedy completion is the right answer.

    Raises:
        ReplayError: for a recorded trajectory without its text.
    """
    trajectories = worker.rollout(step, prompts, VAL)
    right = [_is_right(prompt, found) for prompt, found in zip(prompts, trajectories, strict=True)]
    return sum(right) / len(right)


def _is_right(prompt: Prompt, found: Trajectory) -> bool:
    if found.response is None:
        raise ReplayError(
            f"the recorded trajectory of group {found.group_id!r} run {found.run_id} has no response text to judge; "
            "set evaluation.every_n_steps=0 or record with regress"
        )
    return is_correct(prompt.problem, found.response)


def due(config: Config, step: int) -> bool:
    """Return True if the policy is evaluated after ``step`` steps: at the start, at the end and at every interval."""
    every = config.evaluation.every_n_steps
    return every > 0 and (step % every == 0 or step == config.max_steps)
