"""Faults of what is told of a step where all that it computes is right: of a rollout, and of clipped tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine import trainer
from regress.engine.metrics import rollout_metrics
from regress.grpo import losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.policy_losses import PolicyInputs
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    names=r"(rollouts|system)/.*",
    category="U",
    fresh=True,
    first="step_metrics",
    source="statistics of rewards that each rank logs of its own samples",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    rules=("reported-over-ranks", "reported"),
)
def rollout_reported_by_each_rank_for_itself(patch: Patch) -> None:
    """Report on each rank the rewards and lengths of the samples that it trains on."""

    def found(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        size = -(-len(trajectories) // dist.get_world_size())
        begin = dist.get_rank() * size
        return rollout_metrics(trajectories[begin : begin + size])

    patch.setattr(trainer, "rollout_metrics", found)


@fault(
    names=r"training_step/clip_ratio/(low|high)",
    category="U",
    fresh=True,
    first="metrics",
    source="TRL#3032: a share of clipped tokens by the ratio alone",
    cases=("moe",),
    variants=("packed-mbs3",),
    rules=("reported",),  # names the tokens that it counts
)
def clipped_counted_whatever_the_advantage(patch: Patch) -> None:
    """Count every token beyond the clip range as clipped, also where the minimum takes the ratio as it is."""

    @torch.no_grad()
    def found(t: PolicyInputs, objective: ObjectiveFields) -> tuple[Tensor, Tensor]:
        low, high = objective.clip_range
        return t.ratio < low, t.ratio > high

    patch.setattr(losses, "_clipped", found)
