"""An update on packed rows with varlen attention, against the same update on right-padded rows with sdpa.

Timed: a whole step of the engine's trainer on recorded rollouts (layouts, advantages, forward, loss, backward, clip,
AdamW), all samples in one microbatch; ``sorted`` is the cheaper remedy against padding: microbatches of samples of
like length. All sides start from the same weights and see the same trajectories; losses and clipped gradients of
the first step are compared before anything is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.report import Report
from benchmarks.timing import alternate, timed
from benchmarks.workload import TEN_MILLION, Size, make_trainer, make_trajectories, stepper
from regress.dump.trajectory import Trajectory
from regress.engine.grpo_trainer import Trainer

ROUNDS = 5
TOLERANCE = 1e-5
UPDATE = ("algorithm.preset=dapo", "algorithm.old_log_probs=current")
PADDED = (*UPDATE, "batching.layout=padded", "model.attn_implementation=sdpa")
PACKED = (*UPDATE, "batching.layout=packed", "model.attn_implementation=varlen")
SORTED = (*PADDED, "batching.row_order=longest_first", "batching.micro_batch_size=4")


def run() -> Report:
    """Time packed and sorted layouts, both over padded."""
    size = TEN_MILLION
    trajectories = make_trajectories(size, prompts=4, group_size=4)
    layouts = {"padded": PADDED, "sorted": SORTED, "packed": PACKED}
    trainers = {name: make_trainer(size, trajectories, layout) for name, layout in layouts.items()}
    report = Report("packing", "update step time, packed or padded")
    steps = {name: stepper(trainer) for name, trainer in trainers.items()}
    losses = {name: step()["training_step/loss"] for name, step in steps.items()}
    report.facts = {**describe(size, trajectories), "differences": _differences(trainers, losses)}
    measured = alternate({name: timed(step) for name, step in steps.items()}, ROUNDS)
    report.add_times(measured, "padded")
    report.goals["packed over padded"] = (measured.ratio("packed", "padded"), 0.6)
    return report


def describe(size: Size, trajectories: list[Trajectory]) -> dict[str, object]:
    """Return the lengths, and the share of a right-padded batch that holds tokens."""
    lengths = sorted(len(trajectory.tokens) for trajectory in trajectories)
    return {
        "model": size.name,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "lengths": lengths,
        "filled_when_padded": round(sum(lengths) / (len(lengths) * lengths[-1]), 3),
    }


def _differences(trainers: dict[str, Trainer], losses: dict[str, float]) -> dict[str, float]:
    """Return the greatest differences of the first step's losses and gradients from those of ``padded``."""
    gradients = {name: flat_gradient(trainer) for name, trainer in trainers.items()}
    found = {
        "loss": max(abs(loss - losses["padded"]) for loss in losses.values()),
        "gradient": max(relative(g, gradients["padded"]) for g in gradients.values()),
    }
    for name, value in found.items():
        if not value <= TOLERANCE:
            raise AssertionError(
                f"the {name} differs between layouts by {value:.3g}, more than {TOLERANCE:g}"
            )
    return found


def flat_gradient(trainer: Trainer) -> Tensor:
    """Return the (clipped) gradient of the last step, all parameters end to end, float64."""
    gradients = [p.grad.flatten() for _, p in trainer.policy.named_parameters() if p.grad is not None]
    return torch.cat(gradients).double()


def relative(value: Tensor, base: Tensor) -> float:
    """Return the 2-norm of the difference over the 2-norm of ``base``."""
    return float((value - base).norm() / base.norm())
