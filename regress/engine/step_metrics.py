"""Values of a rollout step and of an optimizer update, under the names of `regress.engine.metric_table`.

Trajectories, loss tokens and outcomes of updates are those of all ranks, so every value is that of the whole run.
Standard deviations divide by N - 1, and are 0 for a single value.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.dynamic_sampling import sampling_counts
from regress.engine.engine_ranks import World
from regress.engine.mini_batch import LossTokens
from regress.engine.rollout_worker import UNSCORED
from regress.engine.training_step import StepOutcome
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import ADVANTAGES

Values = dict[str, float | str]
EXAMPLES_EVERY = 10
"""Rollout steps between two examples of a completion."""


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return rewards and completion lengths of a rollout batch; samples that nobody scored have no reward."""
    rewards = [float(one.reward) for one in trajectories if UNSCORED not in one.extra] or [0.0]
    lengths = [len(one.tokens) - one.prompt_length for one in trajectories]
    truncated = sum(one.finish_reason == "length" for one in trajectories)
    return {
        "rollouts/returns_sum": sum(rewards),
        "rollouts/returns_mean": statistics.fmean(rewards),
        "rollouts/returns_std": _std(rewards),
        "rollouts/returns_max": max(rewards),
        "rollouts/returns_min": min(rewards),
        "rollouts/completion_length_mean": statistics.fmean(lengths),
        "rollouts/truncated_ratio": truncated / len(trajectories),
        "system/replay_buffer_size": float(len(trajectories)),
        **sampling_counts(trajectories),
    }


def token_statistics(batches: Sequence[LossTokens]) -> dict[str, float]:
    """Return advantages by sample, and the KL of the policy from the reference before the first update.

    A sample's advantage is the mean over its loss tokens; samples without any are left out. The KL of a token is
    exp(d) - 1 - d with d = log p_ref - log p, J. Schulman, "Approximating KL divergence".
    """
    advantages = [value for tokens in batches for value in _sample_means(tokens)]
    values = {
        "rollouts/advantages_mean": statistics.fmean(advantages) if advantages else 0.0,
        "rollouts/advantages_std": _std(advantages),
    }
    kl = [_reference_kl(tokens) for tokens in batches]
    if kl and all(part is not None for part in kl):
        joined = torch.cat([part for part in kl if part is not None])
        if joined.numel():
            values |= {
                "rollouts/kl_mean": joined.mean().item(),
                "rollouts/kl_std": joined.std().item() if joined.numel() > 1 else 0.0,
                "rollouts/kl_max": joined.max().item(),
            }
    return values


def update_metrics(outcome: StepOutcome, learning_rate: float) -> dict[str, float]:
    """Return the values of one optimizer update, over the loss tokens of its mini-batch."""
    return {
        "training_step/loss": outcome.loss,
        "training_step/grad_norm": outcome.grad_norm,
        "training_step/learning_rate": learning_rate,
        **{f"training_step/{name}": metric.value for name, metric in outcome.metrics.items()},
    }


def loss_components(outcome: StepOutcome) -> dict[str, float]:
    """Return the terms of an update's loss, which add up to it."""
    return {f"training_step/dr_component_{name}": value for name, value in outcome.terms.items()}


def epoch_metrics(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """Return the spread of loss, KL and gradient norm over the optimizer updates of a rollout step.

    Updates that were left out count only as a step of the epoch.
    """
    total, outcomes = len(outcomes), [outcome for outcome in outcomes if not outcome.skipped]
    if not outcomes:
        return {"training_epoch/steps_per_epoch": float(total)}
    losses = [outcome.loss for outcome in outcomes]
    norms = [outcome.grad_norm for outcome in outcomes]
    values = {
        "training_epoch/loss_mean": statistics.fmean(losses),
        "training_epoch/loss_std": _std(losses),
        "training_epoch/grad_norm_mean": statistics.fmean(norms),
        "training_epoch/grad_norm_max": max(norms),
        "training_epoch/steps_per_epoch": float(total),
    }
    kl = [outcome.metrics["kl"].value for outcome in outcomes if "kl" in outcome.metrics]
    if kl:
        values |= {"training_epoch/kl_mean": statistics.fmean(kl), "training_epoch/kl_std": _std(kl)}
    return values


def is_dr_grpo(objective: Objective) -> bool:
    """Return True for Dr. GRPO: no standard deviation in the advantage, one length for every sample."""
    return objective.scale == "none" and objective.aggregation == "seq-mean-token-sum-norm"


def dr_grpo_metrics(batches: Sequence[LossTokens], objective: Objective) -> Values:
    """Return spread and skewness of the samples' advantages; skewness is m3 / m2 ** 1.5, and 0 without spread."""
    values = [value for tokens in batches for value in _sample_means(tokens)]
    mean = statistics.fmean(values) if values else 0.0
    m2, m3 = (statistics.fmean([(value - mean) ** k for value in values] or [0.0]) for k in (2, 3))
    return {
        "dr_grpo/advantages_variance": _std(values) ** 2,
        "dr_grpo/advantages_skewness": m3 / m2**1.5 if m2 > 1e-24 else 0.0,
        "dr_grpo/critic_type": f"none: {ADVANTAGES[objective.advantage].baseline}",
    }


def example(trajectories: Sequence[Trajectory], step: int) -> Values:
    """Return the text of a completion at every so many steps."""
    text = trajectories[0].response
    return {"examples/completion": text} if text is not None and step % EXAMPLES_EVERY == 0 else {}


def layout_metrics(config: Config, world: World, device: torch.device) -> Values:
    """Return who sums the gradients, and the memory of the rank that uses most; all ranks call this together."""
    values: Values = {}
    if config.parallel.data_parallel == "accelerate":
        values |= {"accelerate/device": str(device), "accelerate/sync_gradients": 1.0}
    if config.parallel.data_parallel in ("ddp", "accelerate"):
        values |= {
            "ddp/num_processes": float(world.plan.mesh.world_size),
            "ddp/process_index": float(world.rank),
            "ddp/local_process_index": float(os.environ.get("LOCAL_RANK", world.rank)),
            "ddp/sync_gradients": 1.0,
        }
    if device.type == "cuda":
        own = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
        allocated, reserved = (max(parts) for parts in zip(*world.gather(own), strict=True))
        values |= {
            "system/gpu_memory_allocated_gb": allocated / 2**30,
            "system/gpu_memory_reserved_gb": reserved / 2**30,
        }
    return values


class RunTotals:
    """Values that count from the start of the run; they are part of a checkpoint.

    Attributes:
        rollouts: samples of all rollouts.
        batches: rollout steps.
        best_mean: greatest mean reward of a step.
    """

    def __init__(self) -> None:
        self.rollouts = 0
        self.batches = 0
        self.best_mean: float | None = None

    def count(self, step: Mapping[str, Any], *, several_turns: bool) -> Values:
        """Count a rollout step by its metrics, and return the part of its row that this gives."""
        mean = float(step["rollouts/returns_mean"])
        self.best_mean = mean if self.best_mean is None else max(self.best_mean, mean)
        self.rollouts += int(step["system/replay_buffer_size"])
        self.batches += 1
        values: Values = {
            "rollouts/returns_best_mean": self.best_mean,
            "rollouts/total_rollouts": float(self.rollouts),
            "rollouts/batch_step": float(self.batches),
        }
        if several_turns:
            values |= {
                "batch_returns/mean": mean,
                "batch_returns/max": float(step["rollouts/returns_max"]),
                "batch_returns/best_mean": self.best_mean,
            }
        return values

    def final(self, updates: int) -> Values:
        """Return the row of the end of the run."""
        values: Values = {
            "final/total_steps": float(updates),
            "final/total_batches": float(self.batches),
            "final/total_rollouts": float(self.rollouts),
        }
        if self.best_mean is not None:
            values["final/best_mean_return"] = self.best_mean
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the counts of a checkpoint."""
        self.rollouts, self.batches = int(state["rollouts"]), int(state["batches"])
        self.best_mean = None if state["best_mean"] is None else float(state["best_mean"])


def _std(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):  # an update without loss tokens has no mean
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _sample_means(tokens: LossTokens) -> list[float]:
    """Return the mean advantage of each sample that has loss tokens, in float64."""
    assert tokens.advantages is not None
    count = tokens.num_sequences
    sums = torch.zeros(count, dtype=torch.float64, device=tokens.sequence.device)
    sizes = torch.zeros_like(sums)
    sums.index_add_(0, tokens.sequence, tokens.advantages.double())
    sizes.index_add_(0, tokens.sequence, torch.ones_like(tokens.advantages, dtype=torch.float64))
    kept = sizes > 0
    return [float(value) for value in (sums[kept] / sizes[kept]).tolist()]


def _reference_kl(tokens: LossTokens) -> Tensor | None:
    policy = tokens.sampler_log_probs if tokens.old_log_probs is None else tokens.old_log_probs
    if tokens.ref_log_probs is None or policy is None:
        return None
    d = tokens.ref_log_probs.double() - policy.double()
    return torch.expm1(d) - d
