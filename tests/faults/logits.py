"""Faults in the backward pass from log-probs and entropies to logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regress.grpo import logprobs
from tests.faults.fault import fault
from tests.faults.patch import Patch


def in_logits_gradient(patch: Patch, change: Any) -> None:
    """Replace the gradient of the logits by ``change(right, logits, targets, stats, g, h, temperature, chunk)``."""
    right: Any = logprobs.logits_gradient
    patch.setattr(logprobs, "logits_gradient", lambda *args: change(right, *args))


@fault(
    category="R",
    source="a fused kernel that detaches log-sum-exp",
    first="logit_gradient logit_gradient",
    place="step0/rank0/micro0",
    rules=("log-softmax-backward",),
    calibration=True,
)
def normalization_without_gradient(patch: Patch) -> None:
    """Log-sum-exp is detached, which leaves the gradient of the target's logit alone."""

    def wrong(right: Any, logits: Tensor, targets: Tensor, stats: Any, g: Tensor, *rest: Any) -> Tensor:
        out = torch.zeros_like(logits)
        rows = torch.arange(len(targets), device=targets.device)
        out.view(len(targets), -1)[rows, targets] = (g.reshape(-1) / rest[1]).to(out.dtype)
        return out

    in_logits_gradient(patch, wrong)


@fault(
    category="R",
    source="NeMo-RL PR#935",
    first="logit_gradient logit_gradient",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    rules=("log-softmax-backward",),
)
def temperature_without_gradient(patch: Patch) -> None:
    """The gradient is not divided by the temperature."""

    def wrong(right: Any, *args: Any) -> Tensor:
        found: Tensor = right(*args)
        return torch.mul(found, args[5])

    in_logits_gradient(patch, wrong)


@fault(
    category="R",
    source="verl PR#1672",
    first="logit_gradient logit_gradient",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    rules=("entropy-backward",),
)
def entropy_without_gradient(patch: Patch) -> None:
    """The gradient of the entropy does not reach the logits."""

    def wrong(
        right: Any, logits: Tensor, targets: Tensor, stats: Any, g: Tensor, h: Any, *rest: Any
    ) -> Tensor:
        found: Tensor = right(logits, targets, stats, g, None, *rest)
        return found

    in_logits_gradient(patch, wrong)


@fault(
    category="R",
    source="Liger-Kernel: rows that fill no block",
    first="logit_gradient logit_gradient",
    place="step0/rank0/micro0",
    rules=("logit-gradient",),
)
def last_rows_without_gradient(patch: Patch) -> None:
    """A kernel leaves out the last rows, which fill no block."""

    def wrong(right: Any, *args: Any) -> Tensor:
        found: Tensor = right(*args)
        found[-(len(found) % 8 or 1) :] = 0
        return found

    in_logits_gradient(patch, wrong)


# @@new
