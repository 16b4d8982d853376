"""Rules about the tokens of one microbatch: finite values, and the ratio of a policy with itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regress.live.guarded_microbatch import Microbatch

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Spacing of numbers at 1."""

ROUNDING = 32.0
"""Spacings by which a log-prob may move when rows are split, padded or packed otherwise; benchmarks/guard.py
prints the largest one of its runs."""


def not_finite(micro: Microbatch) -> Iterator[str]:
    """Yield a sentence for each kind of value that is not finite at a loss token."""
    for name, values in (
        ("log_probs", micro.log_probs),
        ("old_log_probs", micro.old),
        ("advantages", micro.advantages),
    ):
        if values is None:
            continue
        wrong = ~torch.isfinite(values[micro.mask])
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            value = float(values[micro.mask][index])
            yield f"{name} is {value} at {micro.place(index)}, and at {int(wrong.sum())} of {wrong.numel()} loss tokens"


def off_policy(micro: Microbatch, eps: float) -> str | None:
    """Return a sentence if a ratio of policies with the same weights is not 1.

    Args:
        eps: spacing of the numbers in which the model computes.
    """
    if not micro.on_policy or micro.old is None:
        return None
    gap = (micro.log_probs - micro.old)[micro.mask].to(torch.float64)
    bound = ROUNDING * eps * (1 + micro.log_probs[micro.mask].to(torch.float64).abs())
    over = gap.abs() - bound
    if not over.numel() or not bool((over > 0).any()):
        return None
    index = int(torch.nan_to_num(over, nan=math.inf).argmax())
    count = int((over > 0).sum())
    return (
        f"the ratio is {math.exp(float(gap[index])):.6g} at {micro.place(index)}, and not 1 at {count} of "
        f"{gap.numel()} loss tokens, although no update lies between the old log-probs and these: look for "
        "dropout, another temperature, mask or position, or log-probs of other tokens"
    )


def worst(values: Tensor) -> int:
    """Return the index of the value of largest magnitude; NaN counts as the largest."""
    return int(torch.nan_to_num(values.abs(), nan=math.inf).argmax())
