"""Faults in the optimizer and its state."""

from __future__ import annotations

from typing import Any

import torch

from regress.engine import build, optim
from regress.engine.build import Run
from regress.engine.optim import adamw
from regress.faults.fault import fault
from regress.faults.patch import Patch


@fault(
    category="M",
    source="verl#5070",
    first="param model.embed_tokens.weight",
    place="step0/rank0",
    rules=("weight-decay",),
    small=True,
    calibration=True,
)
def no_weight_decay(patch: Patch) -> None:
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "weight_decay": 0.0}))


@fault(
    category="M",
    source="AdamW variants that add eps before the bias correction",
    first="param model.embed_tokens.weight",
    place="step0/rank0",
    rules=("optimizer-eps",),
    small=True,
    calibration=True,
)
def epsilon_inside_the_correction(patch: Patch) -> None:
    """sqrt(v) + eps is divided by the bias correction, not sqrt(v) alone."""

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        eps, (_, beta2) = group["eps"], group["betas"]
        (number,) = {int(state["step"]) + 1 for state in optimizer.state.values()}
        group["eps"] = eps / (1 - beta2**number) ** 0.5
        optimizer.step()
        group["eps"] = eps

    patch.setattr(optim, "update", wrong)


@fault(
    category="M",
    source="Megatron PR#5976",
    first="optimizer model.embed_tokens.weight/step",
    place="step0/rank0",
    rules=("step-counter",),
    calibration=True,
)
def counter_one_ahead(run: Run) -> None:
    """A synthetic first step, made to allocate the state, counts."""
    for state in run.trainer.optimizer.state.values():
        state["step"] += 1


@fault(
    category="M",
    source="a learning rate that is rounded on its way",
    first="param model.embed_tokens.weight",
    place="step0/rank0",
    rules=("learning-rate",),
    small=True,
    calibration=True,
)
def learning_rate_off(patch: Patch) -> None:
    """The learning rate is 1 % too large."""
    right: Any = adamw
    patch.setattr(build, "adamw", lambda named, rate, **rest: right(named, rate * 1.01, **rest))


@fault(
    category="M",
    source="betas of another configuration",
    first="optimizer model.embed_tokens.weight/exp_avg_sq",
    place="step0/rank0",
    rules=("betas",),
    small=True,
    calibration=True,
)
def second_moment_decays_faster(patch: Patch) -> None:
    """beta2 is 0.99 in place of 0.999."""
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "betas": (0.9, 0.99)}))


# @@new
