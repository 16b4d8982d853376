"""Faults of baselines and deviations that rewards are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regress.grpo import advantages
from regress.grpo.estimators import ESTIMATORS, Scored, grpo
from regress.grpo.fields import ObjectiveFields
from tests.faults.fault import fault
from tests.faults.patch import Patch

ADVANTAGES = "advantages advantages"
Estimate = Callable[[Scored, ObjectiveFields], Tensor]


def _estimated_by(patch: Patch, name: str, wrong: Estimate) -> None:
    """Let an estimator of advantages be another function."""
    patch.setattr(advantages, "ESTIMATORS", {**ESTIMATORS, name: wrong})


@fault(
    category="I",
    fresh=True,
    source="a robust baseline of another algorithm",
    first=ADVANTAGES,
    rules=("advantage-offset", "advantages"),  # both name the baseline
)
def median_for_the_mean(patch: Patch) -> None:
    """The baseline of a group is the median of its rewards."""

    def wrong(samples: Scored, o: ObjectiveFields) -> Tensor:
        count = int(samples.index.max()) + 1
        medians = torch.stack([samples.rewards[samples.index == group].median() for group in range(count)])
        return grpo(replace(samples, group=replace(samples.group, mean=medians[samples.index])), o)

    _estimated_by(patch, "grpo", wrong)


@fault(
    category="I",
    fresh=True,
    source="RLOO that takes the mean of the whole group",
    cases=("rloo",),
    variants=("base",),
    first=ADVANTAGES,
    # of three samples each: a factor for all; advantage-penalty names the normalization of rewards
    rules=("advantage-scale", "advantage-penalty", "advantages"),
)
def own_reward_in_the_baseline(patch: Patch) -> None:
    """The baseline of a sample is the mean of its group, its own reward included, and should leave that out."""
    _estimated_by(patch, "rloo", grpo)


@fault(
    category="I",
    fresh=True,
    source="unsloth-zoo PR#832: implementations that add eps in different places",
    cases=("tools",),
    variants=("packed",),
    first=ADVANTAGES,
    # all four name the constant beside the deviation, or the normalization
    rules=("advantage-epsilon", "advantage-scale", "advantage-groups", "advantages"),
)
def epsilon_added_to_the_variance(patch: Patch) -> None:
    """Rewards are divided by the root of variance and eps together, not by the deviation plus eps."""

    def wrong(samples: Scored, o: ObjectiveFields) -> Tensor:
        root = (samples.group.std.square() + o.eps).sqrt()
        return grpo(replace(samples, group=replace(samples.group, std=root - o.eps)), o)

    _estimated_by(patch, "grpo", wrong)
