"""Faults in the optimizer and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regress.engine import build, optim
from regress.engine.build import Run
from regress.engine.optim import adamw
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    precisions=("float64", "float32"),
    category="M",
    source="verl#5070",
    first="param model.embed_tokens.weight",
    place="step0/rank0",
    # optimizer-settings: rounding of float32 hides which setting; weight decay is among what is named
    rules=("weight-decay", "optimizer-settings"),
    small=True,
    calibration=True,
)
def no_weight_decay(patch: Patch) -> None:
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "weight_decay": 0.0}))


@fault(
    precisions=("float64", "float32"),
    category="M",
    source="AdamW variants that add eps before the bias correction",
    first="param model.embed_tokens.weight",
    place="step0/rank0",
    # optimizer-settings: rounding of float32 hides which setting; eps is among what is named
    rules=("optimizer-eps", "optimizer-settings"),
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


Around = Callable[[torch.optim.Optimizer, Callable[[], None]], None]


def around_the_update(patch: Patch, change: Around) -> None:
    """Call ``change(optimizer, update)`` in place of each update."""
    right: Any = optim.update
    patch.setattr(optim, "update", lambda optimizer: change(optimizer, lambda: right(optimizer)))


def configured(patch: Patch, **changed: Any) -> None:
    """Make AdamW with other settings."""
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, **changed}))


EMBEDDING = "model.embed_tokens.weight"


@fault(
    category="M",
    source="Adam with weight_decay in place of AdamW",
    first=f"optimizer {EMBEDDING}/exp_avg",
    rules=("weight-decay-in-the-gradient",),
)
def coupled_weight_decay(patch: Patch) -> None:
    """Weight decay is added to the gradient."""

    def wrong(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])
            group["weight_decay"] = 0.0
        update()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    around_the_update(patch, wrong)


@fault(
    category="M",
    source="betas of another configuration",
    first=f"optimizer {EMBEDDING}/exp_avg",
    rules=("betas",),
)
def first_moment_decays_faster(patch: Patch) -> None:
    """beta1 is 0.8 in place of 0.9."""
    configured(patch, betas=(0.8, 0.999))


@fault(
    category="M",
    source="eps of another framework",
    first=f"param {EMBEDDING}",
    rules=("optimizer-eps", "optimizer-settings"),
)
def epsilon_of_another_framework(patch: Patch) -> None:
    """eps is 1e-6 in place of 1e-8."""
    configured(patch, eps=1e-6)


@fault(
    category="M",
    source="optimizer.step in trainer and engine",
    first="optimizer",
    # update-made-twice: proven by the values
    rules=("update-sign", "step-counter", "update-made-twice"),
)
def update_made_twice(patch: Patch) -> None:
    """The optimizer steps twice on the same gradients."""

    def wrong(_: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        update()
        update()

    around_the_update(patch, wrong)


@fault(
    category="M",
    source="maximize=True",
    first=f"optimizer {EMBEDDING}/exp_avg",
    rules=("update-sign", "gradient-sign"),
)
def update_uphill(run: Run) -> None:
    """The optimizer maximizes."""
    for group in run.trainer.optimizer.param_groups:
        group["maximize"] = True


@fault(category="M", source="correct_bias=False", first=f"param {EMBEDDING}", rules=("bias-correction",))
def bias_not_corrected(patch: Patch) -> None:
    """Moments are not divided by what is missing of them in early updates."""

    def wrong(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        steps = {parameter: state["step"].clone() for parameter, state in optimizer.state.items()}
        for state in optimizer.state.values():
            state["step"].fill_(1e7)
        update()
        for parameter, number in steps.items():
            optimizer.state[parameter]["step"].copy_(number + 1)

    around_the_update(patch, wrong)


@fault(
    category="M",
    source="decay that is not multiplied by the learning rate",
    first=f"param {EMBEDDING}",
    rules=("weight-decay",),
)
def decay_not_times_the_rate(patch: Patch) -> None:
    """Parameters are multiplied by 1 - decay."""
    right: Any = adamw

    def wrong(named: Any, rate: float, *, weight_decay: float, **rest: Any) -> Any:
        return right(named, rate, weight_decay=weight_decay / rate, **rest)

    patch.setattr(build, "adamw", wrong)


@fault(
    category="M",
    source="decay behind the update",
    first=f"param {EMBEDDING}",
    rules=("weight-decay", "optimizer-settings"),
)
def decay_after_the_update(patch: Patch) -> None:
    """Updated parameters decay, not those of before."""

    def wrong(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        update()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for parameter in group["params"]:
                parameter.detach().mul_(1.0 - group["lr"] * decay)

    around_the_update(patch, wrong)


@fault(
    category="M",
    source="verl PR#7215, the reverse",
    first="param",
    names=r".*norm.*",
    rules=("weight-decay",),
)
def norms_do_not_decay(patch: Patch) -> None:
    """Weights of norms do not decay, as in many trainers, and should here."""

    def wrong(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        (group,) = optimizer.param_groups
        flat = [parameter for parameter in group["params"] if parameter.ndim == 1]
        with torch.no_grad():
            for parameter in flat:
                parameter.div_(1.0 - group["lr"] * group["weight_decay"])
        update()

    around_the_update(patch, wrong)


@fault(
    category="M",
    source="accelerate#2665: parameters of before",
    first="optimizer",
    names=r"model\.layers\.1\..*",
    rules=("no-update",),
)
def last_layer_not_in_the_optimizer(patch: Patch) -> None:
    """The optimizer leaves the last layer as it is."""

    def wrong(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        (group,) = optimizer.param_groups
        params, names = group["params"], group["param_names"]
        kept = [(p, n) for p, n in zip(params, names, strict=True) if "layers.1." not in n]
        group["params"], group["param_names"] = [p for p, _ in kept], [n for _, n in kept]
        update()
        group["params"], group["param_names"] = params, names

    around_the_update(patch, wrong)


@fault(
    category="N",
    source="the_well#77: state of the optimizer that is not loaded",
    first="optimizer",
    rules=("step-counter", "moments-dropped"),
)
def state_not_loaded(run: Run) -> None:
    """The optimizer begins anew."""
    run.trainer.optimizer.state.clear()


@fault(
    category="M",
    source="moments exchanged on their way from a checkpoint",
    first="optimizer",
    # state-of-a-rank-unclipped: it names the state that the gradient is added to, exchanged
    rules=("betas", "state-of-a-rank-unclipped"),
)
def moments_exchanged(run: Run) -> None:
    """First and second moments are taken for each other."""
    for state in run.trainer.optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


# @@new
