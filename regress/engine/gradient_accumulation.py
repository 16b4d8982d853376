"""Gradients of several passes, each of which adds its own or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.local_tensor import local


@contextmanager
def added(policy: LocalPolicy) -> Iterator[None]:
    """Add the gradients of the passes inside to those that are there; an exception leaves those exactly as they were.

    Where passes end with a sum over ranks, earlier gradients are set aside, because they were summed before. Elsewhere
    each microbatch adds to them, so that the passes may be cut anywhere between microbatches: bit for bit the same.
    """
    named = dict(policy.named_parameters())
    before = {name: p.grad for name, p in named.items() if p.grad is not None}
    known = before if policy.sums_gradients else {name: grad.clone() for name, grad in before.items()}
    if policy.sums_gradients:
        policy.zero_grad()
    try:
        yield
    except BaseException:
        policy.zero_grad()
        for name, grad in known.items():
            named[name].grad = grad
        raise
    if policy.sums_gradients:
        _add(policy, before)


@torch.no_grad()
def _add(policy: LocalPolicy, before: dict[str, Tensor]) -> None:
    for name, parameter in policy.named_parameters():
        if name not in before:
            continue
        earlier = before[name]
        if parameter.grad is not None:
            local(earlier).add_(local(parameter.grad))
        parameter.grad = earlier
