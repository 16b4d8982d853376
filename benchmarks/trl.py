"""Our update step against that of TRL's GRPOTrainer: same weights, completions, rewards, machine, one thread.

Timed here: all of the trainer's step on recorded rollouts: masks, layouts, loss weights, advantages, forward, loss,
backward, clip, AdamW, metrics; packed rows, varlen attention. Timed there: everything that TRL's own loop does between
`on_step_begin` and `on_step_end` (forward, loss, metrics, backward, clip, fused AdamW, clearing gradients), except
`_generate_and_score_completions`: its padding, decoding, rewards and advantages are not counted, which favors TRL.
Neither side makes a second forward pass for old log-probs (TRL makes none when rollouts and updates are aligned;
here `old_log_probs=current`), needs a reference model, or recomputes activations: TRL's default of gradient
checkpointing, which would save memory and cost time, is switched off, so that like is compared with like. Both run with
the whole batch in one pass, and in four.

Padding is not all that differs. The head is the other part: here it sees loss tokens only. TRL's fused head scores
padding too unless it runs on Triton, and computes the logits once more in the backward pass, to hold fewer of them. So
our step on padded rows is shown as well.

Before anything is timed, the first step is compared: loss, gradient norm, clipped gradient, and update.
Memory is measured in one process per side, see `benchmarks.trl_memory`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.packing import TOLERANCE, describe, flat_gradient, relative
from benchmarks.report import Report
from benchmarks.timing import Side, alternate, timed
from benchmarks.trl_side import EPSILON, LEARNING_RATE, MAX_GRAD_NORM, TrlSide
from benchmarks.workload import TEN_MILLION, Size, make_trainer, make_trajectories, stepper
from regress.dump.trajectory import Trajectory
from regress.engine.grpo_trainer import Trainer

ROUNDS = 5
PACKAGES = ("torch", "transformers", "accelerate", "trl")
PROMPTS, GROUP_SIZE = 4, 4
THEIRS = {"TRL": 1, "TRL, 4 passes": 4}
PACKED = ("batching.layout=packed", "model.attn_implementation=varlen")
OURS = {
    "regress": PACKED,
    "regress, 4 passes": (*PACKED, f"batching.micro_batch_size={PROMPTS * GROUP_SIZE // 4}"),
    "regress, padded": ("batching.layout=padded", "model.attn_implementation=sdpa"),
}
SETTINGS = (
    "algorithm.preset=trl:dapo",
    "algorithm.old_log_probs=current",
    f"optimizer.learning_rate={LEARNING_RATE}",
    f"optimizer.eps={EPSILON}",
    f"optimizer.max_grad_norm={MAX_GRAD_NORM}",
)


@dataclass(frozen=True)
class FirstStep:
    """Values that must agree on all sides: loss, norm of the gradient, gradient clipped by it, change of weights."""

    loss: float
    grad_norm: float
    gradient: Tensor
    update: Tensor

    def differences(self, base: FirstStep, name: str) -> dict[str, float]:
        """Return the differences from ``base``; raises `AssertionError` naming the side ``name`` if one
        exceeds `TOLERANCE`.
        """
        found = {
            "loss": abs(self.loss - base.loss),
            "gradient norm": abs(self.grad_norm - base.grad_norm) / base.grad_norm,
            "gradient": relative(self.gradient, base.gradient),
            "update": relative(self.update, base.update),
        }
        for what, value in found.items():
            if not value <= TOLERANCE:
                raise AssertionError(f"{name}: the {what} differs by {value:.3g}, more than {TOLERANCE:g}")
        return found


def run() -> Report:
    """Measure time and memory of both; of TRL's two ways to split the batch the faster one counts."""
    size = TEN_MILLION
    trajectories = make_trajectories(size, prompts=PROMPTS, group_size=GROUP_SIZE)
    report = Report("trl", "update step against TRL's GRPOTrainer")
    report.facts = {**describe(size, trajectories), "versions": {name: version(name) for name in PACKAGES}}
    with tempfile.TemporaryDirectory() as folder:
        ours = {name: make_ours(size, trajectories, layout) for name, layout in OURS.items()}
        theirs = {
            name: make_theirs(size, trajectories, Path(folder), passes) for name, passes in THEIRS.items()
        }
        steps = {name: stepper(trainer) for name, trainer in ours.items()}
        report.facts["differences"] = _differences(ours, theirs, steps)
        sides: dict[str, Side] = {name: side.step for name, side in theirs.items()}
        sides |= {name: timed(step) for name, step in steps.items()}
        measured = alternate(sides, ROUNDS)
        for side in theirs.values():
            side.close()
    report.add_times(measured, "TRL")
    for name in sides:
        report.rows[name] |= peak_memory(name)
    fastest = min(theirs, key=measured.wall)
    report.goals[f"step time of regress over that of {fastest}"] = (measured.ratio("regress", fastest), 0.5)
    return report


def make_ours(size: Size, trajectories: list[Trajectory], layout: tuple[str, ...]) -> Trainer:
    """Return our side, with its batch in a layout."""
    return make_trainer(size, trajectories, (*SETTINGS, *layout))


def make_theirs(size: Size, trajectories: list[Trajectory], folder: Path, passes: int) -> TrlSide:
    """Return TRL's side, with the same weights."""
    model = make_trainer(size, trajectories, ("model.attn_implementation=sdpa",)).policy.model
    return TrlSide(model, trajectories, folder, size=size, microbatches=passes)


def peak_memory(name: str) -> dict[str, int]:
    """Return the memory columns of two steps, measured in a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.trl_memory", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _differences(
    ours: dict[str, Trainer], theirs: dict[str, TrlSide], steps: dict[str, Callable[[], dict[str, float]]]
) -> dict[str, dict[str, float]]:
    """Take the first step on all sides; return the relative differences from our first side (absolute for
    the loss).
    """
    before = _weights(next(iter(ours.values())).policy.model)
    found = {}
    for name, trainer in ours.items():
        metrics = steps[name]()
        weights = _weights(trainer.policy.model)
        found[name] = FirstStep(
            metrics["training_step/loss"],
            metrics["training_step/grad_norm"],
            flat_gradient(trainer),
            weights - before,
        )
    for name, side in theirs.items():
        side.keep_gradient = True
        side.step()
        side.keep_gradient = False
        assert side.gradient is not None
        found[name] = FirstStep(
            side.trainer.loss, side.trainer.grad_norm, side.gradient, _weights(side.model) - before
        )
    base, *others = found
    return {name: found[name].differences(found[base], name) for name in others}


def _weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
