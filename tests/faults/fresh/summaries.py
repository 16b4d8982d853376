"""Faults of what a step tells of its rollout and of its updates, where all that it computes is right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from regress.dump.trajectory import Trajectory
from regress.engine import metrics, passes, trainer
from regress.engine.batch import LossTokens
from regress.grpo.losses import TokenLoss
from regress.grpo.metrics import Metric, token_metrics
from regress.grpo.segments import segment_lengths, segment_sum
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    names=r"rollouts/kl_mean",
    category="U",
    fresh=True,
    first="step_metrics",
    source="verl: masked_mean over the tokens of a sample, and then over samples",
    variants=("packed-reversed",),
    rules=("reported",),
)
def reported_kl_averaged_by_samples(patch: Patch) -> None:
    """Report the mean over samples of the mean KL of their tokens, not that over all tokens."""
    right: Any = metrics.token_statistics

    def found(batches: Sequence[LossTokens]) -> dict[str, float]:
        known: dict[str, float] = right(batches)
        means: list[float] = []
        for tokens in batches:
            kl = metrics._reference_kl(tokens)
            assert kl is not None
            lengths = segment_lengths(tokens.sequence, tokens.num_sequences)
            sums = segment_sum(kl, tokens.sequence, tokens.num_sequences)
            means += (sums[lengths > 0] / lengths[lengths > 0]).tolist()
        return {**known, "rollouts/kl_mean": statistics.fmean(means)}

    patch.setattr(trainer, "token_statistics", found)


@fault(
    names=r"rollouts/completion_length_mean",
    category="U",
    fresh=True,
    first="step_metrics",
    source="TRL#5144: lengths of completions by the mask of what was sampled",
    cases=("tools",),
    variants=("packed",),
    rules=("reported",),  # names the tokens that it counts
)
def replies_not_counted_in_the_length(patch: Patch) -> None:
    """Report the mean number of sampled tokens as the length of completions, without the environment's answers."""
    right: Any = metrics.rollout_metrics

    def found(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        lengths = [sum(one.loss_mask) for one in trajectories]
        return {**right(trajectories), "rollouts/completion_length_mean": statistics.fmean(lengths)}

    patch.setattr(trainer, "rollout_metrics", found)


@fault(
    names=r"training_step/(policy_loss|kl|entropy|approx_kl/.*|ratio/mean)",
    category="U",
    kind="precision",
    fresh=True,
    first="metrics",
    source="metrics that are summed as tensors of the model's dtype",
    cases=("tools",),
    variants=("packed",),
    rules=("reported", "precision"),
)
def sums_of_metrics_in_bfloat16(patch: Patch) -> None:
    """Report means whose sums over the tokens of a microbatch are rounded to half precision."""
    right: Any = token_metrics

    def found(loss: TokenLoss) -> dict[str, Metric]:
        known: dict[str, Metric] = right(loss)
        return {
            name: replace(metric, total=float(torch.tensor(metric.total).bfloat16()))
            if metric.kind == "mean"
            else metric
            for name, metric in known.items()
        }

    patch.setattr(passes, "token_metrics", found)
