"""Changes of the model, of accumulation and of the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regress.engine import optimizer as optim
from regress.engine import run_construction, step_taps
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.run_construction import Run
from regress.replay.fault_injection import Patch
from regress.replay.probes.update_probes import after_each_backward
from tests.regression.changes.change import Change

# the model


def attention_of_layer_0_sharper(run: Run) -> None:
    run.trainer.policy.model.model.layers[0].self_attn.scaling *= 1.5


def residual_of_layer_1_halved(run: Run) -> None:
    def wrong(module: Any, args: Any, out: Tensor) -> Tensor:
        return args[0] + 0.5 * (out - args[0])

    run.trainer.policy.model.model.layers[1].register_forward_hook(wrong, prepend=True)


def one_weight_changed(run: Run) -> None:
    with torch.no_grad():
        run.trainer.policy.model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.5


def mlp_gradient_detached(run: Run) -> None:
    """Nothing goes back through the MLP of layer 0."""
    run.trainer.policy.model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out.detach(), prepend=True
    )


def one_gradient_with_noise(run: Run) -> None:
    weight = run.trainer.policy.model.model.layers[0].mlp.gate_proj.weight
    weight.register_hook(lambda gradient: gradient + 1e-3 * torch.sin(1e3 * gradient))


# accumulation and the optimizer


def gradients_not_dropped(patch: Patch) -> None:
    patch.setattr(LocalPolicy, "zero_grad", lambda self: None)


def first_microbatch_dropped(patch: Patch) -> None:
    done: list[int] = []

    def drop(self: LocalPolicy, last: bool) -> None:
        if not done:
            self.model.zero_grad(set_to_none=True)
        done.append(1)
        if last:
            done.clear()

    after_each_backward(patch, drop)


def mean_so_far(patch: Patch) -> None:
    """The buffer is halved after each microbatch: an average in place of a sum."""

    def halve(self: LocalPolicy, last: bool) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2

    after_each_backward(patch, halve)


def decay_in_the_gradient(patch: Patch) -> None:
    """Weight decay is added to the clipped gradient (Adam in place of AdamW)."""
    right: Any = run_construction.adamw

    def wrong(*args: Any, weight_decay: float = 0.0, **rest: Any) -> Any:
        found = right(*args, weight_decay=0.0, **rest)

        def coupled(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter.detach(), alpha=weight_decay)

        found.register_step_pre_hook(coupled)
        return found

    patch.setattr(run_construction, "adamw", wrong)


def decay_before_the_clip(patch: Patch) -> None:
    """L2 regularization: the gradient that is recorded holds the parameters."""
    right: Any = step_taps.gradients

    def wrong(self: LocalPolicy, *args: Any) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.01)
        return right(self, *args)

    patch.setattr(step_taps, "gradients", wrong)


def norm_of_squares(patch: Patch) -> None:
    right: Any = LocalPolicy._total_norm
    patch.setattr(LocalPolicy, "_total_norm", lambda self, norms: right(self, norms) ** 2)


def second_beta_off(patch: Patch) -> None:
    right: Any = run_construction.adamw
    patch.setattr(run_construction, "adamw", lambda *a, **r: right(*a, **{**r, "betas": (0.9, 0.95)}))


def first_beta_off(patch: Patch) -> None:
    right: Any = run_construction.adamw
    patch.setattr(run_construction, "adamw", lambda *a, **r: right(*a, **{**r, "betas": (0.8, 0.999)}))


def moments_dropped(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        right(optimizer)

    patch.setattr(optim, "update", wrong)


def update_made_twice(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        right(optimizer)
        right(optimizer)

    patch.setattr(optim, "update", wrong)


def rate_doubled(patch: Patch) -> None:
    right: Any = run_construction.adamw
    patch.setattr(run_construction, "adamw", lambda named, rate, **rest: right(named, 2 * rate, **rest))


def parameters_in_float32(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        right(optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.float())

    patch.setattr(optim, "update", wrong)


CHANGES = (
    Change(attention_of_layer_0_sharper, "dense", ("module",)),
    Change(residual_of_layer_1_halved, "dense", ("module",)),
    Change(one_weight_changed, "dense", ("module",)),
    Change(mlp_gradient_detached, "dense", ("gradient-zero", "gradient-missing", "backward-of-a-module")),
    Change(one_gradient_with_noise, "dense", ("gradient-of-one-tensor",)),
    Change(gradients_not_dropped, "dense", ("gradient-of-the-last-update",), steps=2),
    Change(first_microbatch_dropped, "dense", ("accumulation",)),
    Change(mean_so_far, "dense", ("accumulation",)),
    Change(decay_in_the_gradient, "dense", ("weight-decay-in-the-gradient",)),
    Change(decay_before_the_clip, "dense", ("decay-in-the-gradient",)),
    Change(norm_of_squares, "dense", ("norm",)),
    Change(second_beta_off, "dense", ("betas",)),
    Change(first_beta_off, "dense", ("betas",)),
    Change(moments_dropped, "dense", ("moments-dropped", "state-of-a-rank-unclipped")),
    Change(update_made_twice, "dense", ("step-counter", "update-made-twice")),
    Change(rate_doubled, "dense", ("learning-rate", "update-made-twice")),
    Change(parameters_in_float32, "dense", ("param-dtype",)),
)
