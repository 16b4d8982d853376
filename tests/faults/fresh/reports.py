"""Faults of one process in what a step reports, where all that it computes is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regress.dump.trajectory import Trajectory
from regress.engine import metrics, passes, trainer
from regress.grpo.losses import TokenLoss
from regress.grpo.metrics import Metric, token_metrics
from tests.faults.fault import fault
from tests.faults.patch import Patch

BLIND = ("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3")


@fault(
    names=r"rollouts/truncated_ratio",
    category="U",
    fresh=True,
    first="step_metrics",
    source="a share of finished samples logged as that of truncated ones",
    cases=("dapo",),
    rules=("reported",),
    blind=BLIND,
)
def finished_share_for_truncated(patch: Patch) -> None:
    """Report the share of samples that ended by themselves as that of truncated ones."""
    right: Any = metrics.rollout_metrics

    def found(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        known = right(trajectories)
        return {**known, "rollouts/truncated_ratio": 1.0 - known["rollouts/truncated_ratio"]}

    patch.setattr(trainer, "rollout_metrics", found)


@fault(
    names=r"training_step/(kl|policy_loss)",
    category="U",
    fresh=True,
    first="metrics",
    source="TRL: means over tokens that count each sample's length twice",
    rules=("reported",),
    blind=BLIND,
)
def means_of_counted_tokens_alone(patch: Patch) -> None:
    """Report means of terms over the tokens whose advantage is not 0 alone."""
    right: Any = token_metrics

    def found(loss: TokenLoss) -> dict[str, Metric]:
        known: dict[str, Metric] = right(loss)
        here = loss.policy_K != 0
        for name, values in (("kl", loss.kl_K), ("policy_loss", loss.policy_K)):
            if values is not None:
                known[name] = Metric(float(values[here].double().sum()), int(here.sum()))
        return known

    patch.setattr(passes, "token_metrics", found)


@fault(
    names=r"training_step/approx_kl/k3",
    category="U",
    fresh=True,
    first="metrics",
    source="verl: approx_kl of the ratio at its level",
    rules=("reported",),
    blind=BLIND,
)
def divergence_of_old_from_new_reported(patch: Patch) -> None:
    """Report the estimate k3 with old and new policy exchanged."""
    right: Any = token_metrics

    def found(loss: TokenLoss) -> dict[str, Metric]:
        known: dict[str, Metric] = right(loss)
        x = -loss.log_ratio_K
        known["approx_kl/k3"] = Metric(float((torch.expm1(x) - x).double().sum()), x.numel())
        return known

    patch.setattr(passes, "token_metrics", found)
