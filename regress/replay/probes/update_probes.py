"""Probes of the update: microbatches, sums and norms of gradients, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regress.engine import grpo_trainer, run_construction
from regress.engine import optimizer as optim
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import Microbatch
from regress.engine.run_construction import Run
from regress.replay.fault_injection import Patch, around, by, in_place_of
from regress.replay.probes import probe


@probe()
def counter_one_ahead(run: Run) -> None:
    """A synthetic first step, made to allocate the state, counts."""
    for state in run.trainer.optimizer.state.values():
        state["step"] += 1


@probe(small=True)
@in_place_of(optim, "update")
def epsilon_inside_the_correction(optimizer: torch.optim.Optimizer) -> Any:
    """sqrt(v) + eps is divided by the bias correction, not sqrt(v) alone."""
    (group,) = optimizer.param_groups
    eps, (_, beta2) = group["eps"], group["betas"]
    (number,) = {int(state["step"]) + 1 for state in optimizer.state.values()}
    group["eps"] = eps / (1 - beta2**number) ** 0.5
    optimizer.step()
    group["eps"] = eps


@probe(small=True)
@around(run_construction, "adamw")
def learning_rate_off(right: Any, named: Any, rate: Any, **rest: Any) -> Any:
    """The learning rate is 1 % too large."""
    return right(named, rate * 1.01, **rest)


@probe(small=True)
@around(run_construction, "adamw")
def no_weight_decay(right: Any, *args: Any, **rest: Any) -> Any:
    return right(*args, **{**rest, "weight_decay": 0.0})


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


@probe(small=True)
@by(after_each_backward)
def gradients_in_bfloat16(policy: LocalPolicy, last: bool) -> Any:
    """The buffer that gradients are summed in has half precision."""
    for parameter in policy.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)


@probe()
@around(grpo_trainer, "train_step")
def last_microbatch_left_out(
    right: Any, model: Any, optimizer: Any, tokens: Any, micros: Sequence[Microbatch], *args: Any, **rest: Any
) -> Any:
    return right(model, optimizer, tokens, micros[:-1], *args, **rest)


@probe(small=True)
@around(LocalPolicy, "clip_grad_norm")
def norm_of_clipping_off(right: Any, self: LocalPolicy, limit: Any) -> Any:
    """Gradients are clipped at a norm 1 % too large."""
    return right(self, None if limit is None else limit * 1.01)
