"""Faults on the way from rewards to advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import trainer
from regress.faults.fault import fault
from regress.faults.patch import Patch
from regress.grpo import estimators
from regress.grpo.advantages import token_advantages
from regress.grpo.groups import group_statistics
from regress.grpo.objective import Objective


@fault(
    category="I",
    source="unsloth-zoo PR#832",
    first="advantages advantages",
    place="step0/rank0/micro0",
    tokens="of varied groups",
    rules=("deviation-ddof",),
    small=True,
    calibration=True,
    blind=("cosine 0.99", "allclose", "mean 1e-3"),
    silent={"dr_grpo": "nothing is divided by the deviation"},
)
def population_deviation(patch: Patch) -> None:
    """The deviation divides by N in place of N - 1."""
    statistics: Any = group_statistics
    patch.setattr(
        estimators, "group_statistics", lambda rewards, groups, ddof: statistics(rewards, groups, 0)
    )


@fault(
    category="I",
    source="unsloth-zoo PR#832: 1e-4 or 1e-6",
    first="advantages advantages",
    rules=("advantage-epsilon",),
    small=True,
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def deviation_epsilon(patch: Patch) -> None:
    """The deviation that divides an advantage has 1e-4 added to its epsilon."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, sequence: Tensor, objective: Objective, *rest: Any) -> Any:
        return right(rewards, groups, sequence, replace(objective, eps=objective.eps + 1e-4), *rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    source="prime-rl PR#600, R1-V#67",
    first="advantages advantages",
    place="step0/rank0/micro0",
    rules=("advantage-groups",),
    calibration=True,
)
def groups_interleaved(patch: Patch) -> None:
    """Samples of one group lie together, but are grouped as if the groups were interleaved."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Any:
        return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)

    patch.setattr(trainer, "token_advantages", wrong)


# @@new
