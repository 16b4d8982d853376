"""Faults in the optimizer and its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.engine import optimizer as optim
from regress.engine import run_construction
from regress.engine.optimizer import adamw
from regress.replay.fault_injection import around, by
from regress.replay.probes.update_probes import (
    counter_one_ahead,
    epsilon_inside_the_correction,
    learning_rate_off,
    no_weight_decay,
)
from tests.faults.fault import fault, met_in

# optimizer-settings: rounding of float32 hides which setting; weight decay is among what is named
fault(
    "M",
    "param model.embed_tokens.weight",
    "weight-decay optimizer-settings",
    place="step0/rank0",
    precisions="float64 float32",
)(met_in("verl#5070")(no_weight_decay))

# optimizer-settings: rounding of float32 hides which setting; eps is among what is named
# all steps: what one update makes of it is within a few times the rounding of float32
fault(
    "M",
    "param model.embed_tokens.weight",
    "optimizer-eps optimizer-settings",
    place="step0/rank0",
    precisions="float64 float32",
    steps=None,
)(met_in("AdamW variants that add eps before the bias correction")(epsilon_inside_the_correction))

fault("M", "optimizer model.embed_tokens.weight/step", "step-counter", place="step0/rank0")(
    met_in("Megatron PR#5976")(counter_one_ahead)
)

fault("M", "param model.embed_tokens.weight", "learning-rate", place="step0/rank0")(
    met_in("a learning rate that is rounded on its way")(learning_rate_off)
)


@fault("M", "optimizer model.embed_tokens.weight/exp_avg_sq", "betas", place="step0/rank0")
@met_in("betas of another configuration")
@around(run_construction, "adamw")
def second_moment_decays_faster(right, *args, **rest):
    """beta2 is 0.99 in place of 0.999."""
    return right(*args, **{**rest, "betas": (0.9, 0.99)})


Around = Callable[[torch.optim.Optimizer, Callable[[], None]], None]


def around_the_update(patch, change):
    """Call ``change(optimizer, update)`` in place of each update."""
    right = optim.update
    patch.setattr(optim, "update", lambda optimizer: change(optimizer, lambda: right(optimizer)))


@dataclass(frozen=True)
class Moments:
    """State of AdamW for a parameter, once its moments are updated: `number` counts its updates from 1."""

    gradient: Tensor
    first: Tensor
    second: Tensor
    number: float
    beta1: float
    beta2: float
    eps: float


def with_direction(patch, direction):
    """Let AdamW move every parameter by another mean over another root; its moments and its decay are right."""

    @torch.no_grad()
    def wrong(optimizer, update):
        before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
        update()
        for group in optimizer.param_groups:
            rate, settings = group["lr"], (*group["betas"], group["eps"])
            for p, weights in ((p, before[p]) for p in group["params"]):
                state = optimizer.state[p]
                moments = Moments(
                    p.grad, state["exp_avg"], state["exp_avg_sq"], float(state["step"]), *settings
                )
                mean, root = direction(moments)
                p.copy_(weights * (1 - rate * group["weight_decay"]) - rate * mean / root)

    around_the_update(patch, wrong)


def configured(patch, **changed):
    """Make AdamW with other settings."""
    right = adamw
    patch.setattr(run_construction, "adamw", lambda *args, **rest: right(*args, **{**rest, **changed}))


EMBEDDING = "model.embed_tokens.weight"


@fault("M", f"optimizer {EMBEDDING}/exp_avg", "weight-decay-in-the-gradient")
@met_in("Adam with weight_decay in place of AdamW")
@by(around_the_update)
def coupled_weight_decay(optimizer, update):
    """Weight decay is added to the gradient."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])
        group["weight_decay"] = 0.0
    update()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


@fault("M", f"optimizer {EMBEDDING}/exp_avg", "betas")
@met_in("betas of another configuration")
def first_moment_decays_faster(patch):
    """beta1 is 0.8 in place of 0.9."""
    configured(patch, betas=(0.8, 0.999))


@fault("M", f"param {EMBEDDING}", "optimizer-eps optimizer-settings")
@met_in("eps of another framework")
def epsilon_of_another_framework(patch):
    """eps is 1e-6 in place of 1e-8."""
    configured(patch, eps=1e-6)


# update-made-twice: proven by the values
@fault("M", "optimizer", "update-sign step-counter update-made-twice")
@met_in("optimizer.step in trainer and engine")
@by(around_the_update)
def update_made_twice(_, update):
    """The optimizer steps twice on the same gradients."""
    update()
    update()


@fault("M", f"optimizer {EMBEDDING}/exp_avg", "update-sign gradient-sign")
@met_in("maximize=True")
def update_uphill(run):
    """The optimizer maximizes."""
    for group in run.trainer.optimizer.param_groups:
        group["maximize"] = True


@fault("M", f"param {EMBEDDING}", "bias-correction")
@met_in("correct_bias=False")
@by(around_the_update)
def bias_not_corrected(optimizer, update):
    """Moments are not divided by what is missing of them in early updates."""
    steps = {parameter: state["step"].clone() for parameter, state in optimizer.state.items()}
    for state in optimizer.state.values():
        state["step"].fill_(1e7)
    update()
    for parameter, number in steps.items():
        optimizer.state[parameter]["step"].copy_(number + 1)


@fault("M", f"param {EMBEDDING}", "weight-decay")
@met_in("decay that is not multiplied by the learning rate")
@around(run_construction, "adamw")
def decay_not_times_the_rate(right, named, rate, *, weight_decay, **rest):
    """Parameters are multiplied by 1 - decay."""
    return right(named, rate, weight_decay=weight_decay / rate, **rest)


@fault("M", f"param {EMBEDDING}", "weight-decay optimizer-settings")
@met_in("decay behind the update")
@by(around_the_update)
def decay_after_the_update(optimizer, update):
    """Updated parameters decay, not those of before."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    update()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        for parameter in group["params"]:
            parameter.detach().mul_(1.0 - group["lr"] * decay)


@fault("M", "param", "weight-decay", names=r".*norm.*")
@met_in("verl PR#7215, the reverse")
@by(around_the_update)
def norms_do_not_decay(optimizer, update):
    """Weights of norms do not decay, as in many trainers, and should here."""
    (group,) = optimizer.param_groups
    flat = [parameter for parameter in group["params"] if parameter.ndim == 1]
    with torch.no_grad():
        for parameter in flat:
            parameter.div_(1.0 - group["lr"] * group["weight_decay"])
    update()


@fault("M", "optimizer", "no-update", names=r"model\.layers\.1\..*")
@met_in("accelerate#2665: parameters of before")
@by(around_the_update)
def last_layer_not_in_the_optimizer(optimizer, update):
    """The optimizer leaves the last layer as it is."""
    (group,) = optimizer.param_groups
    params, names = group["params"], group["param_names"]
    kept = [(p, n) for p, n in zip(params, names, strict=True) if "layers.1." not in n]
    group["params"], group["param_names"] = [p for p, _ in kept], [n for _, n in kept]
    update()
    group["params"], group["param_names"] = params, names


@fault("N", "optimizer", "step-counter moments-dropped")
@met_in("the_well#77: state of the optimizer that is not loaded")
def state_not_loaded(run):
    """The optimizer begins anew."""
    run.trainer.optimizer.state.clear()


# state-of-a-rank-unclipped: it names the state that the gradient is added to, exchanged
@fault("M", "optimizer", "betas state-of-a-rank-unclipped")
@met_in("moments exchanged on their way from a checkpoint")
def moments_exchanged(run):
    """First and second moments are taken for each other."""
    for state in run.trainer.optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
