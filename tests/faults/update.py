"""Faults in the accumulation of gradients, and in their norm and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regress.engine import trainer
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.step import train_step
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="G",
    source="prime-rl PR#1035",
    first="coverage batch_inputs",
    place="step0",
    status="coverage",
    says="was produced by no microbatch",
    rules=("batch-left-out",),
    calibration=True,
)
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


@fault(
    category="B",
    source="Fast-LLM#550, NeMo Automodel PR#3530",
    first="gradient lm_head.weight",
    place="step0/rank0",
    rules=("accumulation",),
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
    silent={"dense/base": "there is one microbatch"},
)
def only_the_last_survives(patch: Patch) -> None:
    """The gradient buffer is overwritten, not added to."""
    after_each_backward(patch, lambda policy, last: None if last else policy.zero_grad())


@fault(
    category="L",
    source="clipping inside of the accumulation loop",
    first="gradient lm_head.weight",
    place="step0/rank0",
    rules=("accumulation",),
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def clipped_every_microbatch(patch: Patch) -> None:
    def clip(policy: LocalPolicy, last: bool) -> None:
        nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)

    after_each_backward(patch, clip)


@fault(
    category="A",
    source="unsloth-zoo PR#1023, transformers PR#35438",
    first="gradient lm_head.weight",
    place="step0/rank0",
    rules=("gradient-divided-by-microbatches",),
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", "allclose", "mean 1e-3"),
)
def divided_twice(patch: Patch) -> None:
    """The weights hold the denominator, and accumulation over three microbatches divides once more."""

    def divide(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3 if last else 1

    after_each_backward(patch, divide)


@fault(
    category="B",
    source="Megatron#1446: a sum over two ranks taken for a mean",
    first="gradient lm_head.weight",
    place="step0/rank0",
    rules=("gradient-of-one-tensor", "gradient-power-of-two"),
    small=True,
    calibration=True,
)
def one_gradient_halved(patch: Patch) -> None:
    """The sum over two ranks of one parameter's gradient is taken for a mean."""

    def halve(policy: LocalPolicy, last: bool) -> None:
        gradient = next(reversed([*policy.model.parameters()])).grad
        assert gradient is not None
        gradient /= 2 if last else 1

    after_each_backward(patch, halve)


@fault(
    category="O",
    kind="precision",
    source="DeepSpeed PR#7985",
    first="gradient lm_head.weight",
    rules=("gradient-dtype",),
    small=True,
    calibration=True,
)
def gradients_in_bfloat16(patch: Patch) -> None:
    """The buffer that gradients are summed in has half precision."""

    def rounded(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)

    after_each_backward(patch, rounded)


@fault(
    category="L",
    source="AReaL PR#335: an iterator that was used up",
    first="optimizer model.embed_tokens.weight/exp_avg",
    place="step2/rank0",
    steps=None,
    rules=("clip-of-gradients-left-out",),
    calibration=True,
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def clipping_left_out(patch: Patch) -> None:
    right = LocalPolicy.clip_grad_norm
    patch.setattr(LocalPolicy, "clip_grad_norm", lambda self, _: right(self, None))


@fault(
    category="L",
    source="pytorch#149768",
    first="optimizer model.embed_tokens.weight/exp_avg",
    place="step2/rank0",
    steps=None,
    rules=("clip-of-gradients",),
    small=True,
    calibration=True,
)
def norm_of_clipping_off(patch: Patch) -> None:
    """Gradients are clipped at a norm 1 % too large."""
    right = LocalPolicy.clip_grad_norm
    patch.setattr(
        LocalPolicy,
        "clip_grad_norm",
        lambda self, limit: right(self, None if limit is None else limit * 1.01),
    )


@fault(
    category="N",
    source="verl PR#5725: a position in the data that is counted twice",
    first="coverage",
    rules=("batch-twice", "not-planned"),
)
def first_microbatch_twice(patch: Patch) -> None:
    """The first microbatch is trained on again at the end."""
    right: Any = train_step

    def wrong(
        model: Any, optimizer: Any, tokens: Any, micros: Sequence[Microbatch], *args: Any, **rest: Any
    ) -> Any:
        return right(model, optimizer, tokens, [*micros, micros[0]], *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


@fault(
    category="L",
    source="torch.nn.utils.clip_grad_value_",
    first="optimizer",
    rules=("clip-of-gradients", "clip-of-gradients-left-out", "state-of-a-rank-unclipped"),
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def clipped_by_value(patch: Patch) -> None:
    """Every element is clamped at a thousandth, and the norm is left alone."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        norm = right(self, None)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    source="clipping inside a loop over parameters",
    first="optimizer",
    steps=None,
    rules=("clip-of-gradients", "clip-of-gradients-left-out"),
)
def clipped_parameter_by_parameter(patch: Patch) -> None:
    """Each gradient is clipped by its own norm."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        norm = right(self, None)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None and limit is not None:
                parameter.grad.mul_((limit / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    source="norm_type=inf",
    first="grad_norm grad_norm",
    rules=("norm",),
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def largest_norm(patch: Patch) -> None:
    """The largest of the norms of all gradients stands for their norm."""
    patch.setattr(LocalPolicy, "_total_norm", lambda self, norms: torch.stack([*norms.values()]).max())


@fault(
    category="L", source="AReaL#312: squares that are not taken", first="grad_norm grad_norm", rules=("norm",)
)
def sum_of_norms(patch: Patch) -> None:
    """Norms of gradients are added, not their squares."""
    patch.setattr(LocalPolicy, "_total_norm", lambda self, norms: torch.stack([*norms.values()]).sum())


@fault(
    category="B",
    source="optimizer.zero_grad that is not called",
    first="gradient",
    steps=2,
    place="step1/rank0",
    rules=("gradient-of-the-last-update",),
)
def gradients_of_the_last_update_kept(patch: Patch) -> None:
    """Gradients of the update before are still there."""
    patch.setattr(LocalPolicy, "zero_grad", lambda self: None)


@fault(category="B", source="NeMo Automodel PR#3530", first="gradient", rules=("accumulation",))
def first_microbatch_wiped(patch: Patch) -> None:
    """Gradients are dropped once more after the first microbatch."""
    passed: list[bool] = []

    def wipe(policy: LocalPolicy, last: bool) -> None:
        passed.append(last)
        if len(passed) == 1:
            policy.zero_grad()
        if last:
            passed.clear()

    after_each_backward(patch, wipe)


@fault(
    category="A",
    source="torchtitan#1733: an average that runs along",
    first="gradient",
    rules=("accumulation",),
)
def running_average_of_microbatches(patch: Patch) -> None:
    """After each microbatch what was accumulated is divided by two."""

    def halve(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            if parameter.grad is not None and not last:
                parameter.grad /= 2

    after_each_backward(patch, halve)


# @@new
