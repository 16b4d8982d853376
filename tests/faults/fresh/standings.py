"""Faults of advantages: whose they are, and how exactly a group's deviation is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.trainer import MiniBatch, Trainer
from regress.grpo import estimators
from regress.grpo.groups import GroupStatistics, group_statistics
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.rounding import rounded


@fault(
    category="I",
    fresh=True,
    source="a batch of advantages that each worker reads from its beginning",
    cases=("gpt2",),
    variants=("dp2-packed-budget48",),
    first="advantages",
    ranks=(1,),
    rules=("advantage-of-a-rank", "order-not-restored", "advantage-groups", "advantages"),
)
def advantages_of_the_first_rank_on_all(patch: Patch) -> None:
    """Each rank gives its samples the advantages that the first rank gives to its own."""
    right: Any = Trainer._advantages

    def wrong(self: Trainer, samples: Sequence[Trajectory], minis: Sequence[MiniBatch]) -> Tensor:
        found: Tensor = right(self, samples, minis)
        (mini,) = minis
        sequence = mini.tokens.sequence
        of_samples = found.new_zeros(len(samples)).scatter(0, sequence, found)
        plan = self.world.plan
        own, first = (plan.samples(len(samples), rank) for rank in (dist.get_rank(), 0))
        read = torch.arange(len(samples))
        read[own] = torch.tensor(first[: len(own)])
        return of_samples[read][sequence]

    patch.setattr(Trainer, "_advantages", wrong)


@fault(
    category="I",
    kind="precision",
    fresh=True,
    source="statistics of groups that are gathered as half-precision tensors",
    cases=("moe",),
    variants=("packed-mbs3",),
    first="advantages advantages",
    # advantage-scale: one number for each group; advantage-epsilon: statistics in a lower precision
    rules=("advantage-scale", "advantage-epsilon", "advantages"),
)
def deviation_in_bfloat16(patch: Patch) -> None:
    """The deviation of each group is rounded to half precision before it divides."""

    def wrong(*args: Any) -> GroupStatistics:
        found = group_statistics(*args)
        return replace(found, std=rounded(found.std))

    patch.setattr(estimators, "group_statistics", wrong)
