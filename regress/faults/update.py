"""Faults in gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from regress.engine import build, optim, trainer
from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.optim import adamw
from regress.engine.policy import LocalPolicy
from regress.engine.step import train_step
from regress.faults.patch import Patch

# gradients


def last_microbatch_left_out(patch: Patch) -> None:
    right: Any = train_step

    def wrong(
        model: Any, optimizer: Any, tokens: Any, micros: Sequence[Microbatch], *args: Any, **rest: Any
    ) -> Any:
        return right(model, optimizer, tokens, micros[:-1], *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


def after_each_backward(patch: Patch, change: Callable[[LocalPolicy, bool], None]) -> None:
    """Call ``change(policy, last)`` after the backward pass of each microbatch."""
    right = LocalPolicy.forward_backward

    def wrong(self: LocalPolicy, micros: Sequence[Microbatch], loss: Any) -> list[Any]:
        begun: list[Microbatch] = []

        def and_change(micro: Microbatch, out: Any) -> Any:
            if begun:
                change(self, False)
            begun.append(micro)
            return loss(micro, out)

        results = right(self, micros, and_change)
        change(self, True)
        return results

    patch.setattr(LocalPolicy, "forward_backward", wrong)


def only_the_last_survives(patch: Patch) -> None:
    """The gradient buffer is overwritten, not added to."""
    after_each_backward(patch, lambda policy, last: None if last else policy.zero_grad())


def clipped_every_microbatch(patch: Patch) -> None:
    def clip(policy: LocalPolicy, last: bool) -> None:
        nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)

    after_each_backward(patch, clip)


def divided_twice(patch: Patch) -> None:
    """The weights hold the denominator, and accumulation over three microbatches divides once more."""

    def divide(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3 if last else 1

    after_each_backward(patch, divide)


def clipping_left_out(patch: Patch) -> None:
    right = LocalPolicy.clip_grad_norm
    patch.setattr(LocalPolicy, "clip_grad_norm", lambda self, _: right(self, None))


# the optimizer


def no_weight_decay(patch: Patch) -> None:
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "weight_decay": 0.0}))


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


def counter_one_ahead(run: Run) -> None:
    """A synthetic first step, made to allocate the state, counts."""
    for state in run.trainer.optimizer.state.values():
        state["step"] += 1


def one_gradient_halved(patch: Patch) -> None:
    """The sum over two ranks of one parameter's gradient is taken for a mean."""

    def halve(policy: LocalPolicy, last: bool) -> None:
        gradient = next(reversed([*policy.model.parameters()])).grad
        assert gradient is not None
        gradient /= 2 if last else 1

    after_each_backward(patch, halve)


def gradients_in_bfloat16(patch: Patch) -> None:
    """The buffer that gradients are summed in has half precision."""

    def rounded(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)

    after_each_backward(patch, rounded)


def learning_rate_off(patch: Patch) -> None:
    """The learning rate is 1 % too large."""
    right: Any = adamw
    patch.setattr(build, "adamw", lambda named, rate, **rest: right(named, rate * 1.01, **rest))


def second_moment_decays_faster(patch: Patch) -> None:
    """beta2 is 0.99 in place of 0.999."""
    right: Any = adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "betas": (0.9, 0.99)}))


def norm_of_clipping_off(patch: Patch) -> None:
    """Gradients are clipped at a norm 1 % too large."""
    right = LocalPolicy.clip_grad_norm
    patch.setattr(
        LocalPolicy,
        "clip_grad_norm",
        lambda self, limit: right(self, None if limit is None else limit * 1.01),
    )
