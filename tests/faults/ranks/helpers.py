"""Helpers of faults of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel.policy import ParallelPolicy
from tests.faults.patch import Patch


class DividedGradient(torch.autograd.Function):
    """Passes a tensor on, and its gradient back divided by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.count, None


def before_the_second_backward_pass(patch: Patch, change: Callable[[ParallelPolicy, Tensor], object]) -> None:
    """Call a function with the policy and the loss before rank 1 takes its second microbatch back."""
    passes_of: Any = ParallelPolicy.forward_backward
    right: Any = ParallelPolicy._backward
    made = [0]

    def begun(self: ParallelPolicy, *args: Any) -> Any:
        made[0] = 0
        return passes_of(self, *args)

    def wrong(self: ParallelPolicy, share: Tensor) -> None:
        made[0] += 1
        if made[0] == 2 and on_rank(1):
            change(self, share)
        right(self, share)

    patch.setattr(ParallelPolicy, "forward_backward", begun)
    patch.setattr(ParallelPolicy, "_backward", wrong)


def on_rank(number: int) -> bool:
    return dist.get_rank() == number


def of_others(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sums_of(run: Run) -> list[tuple[list[str], ProcessGroup]]:
    """Return the groups of gradients that the policy sums over ranks, as a list that may be changed."""
    model: Any = run.trainer.policy
    assert isinstance(model, ParallelPolicy)
    assert model._summed
    return model._summed


def without(run: Run, *parts: str) -> None:
    """Leave the parameters whose names have one of these parts out of all sums of gradients."""
    found = sums_of(run)
    kept = [([n for n in names if not any(p in n for p in parts)], group) for names, group in found]
    assert [len(names) for names, _ in kept] != [len(names) for names, _ in found]
    found[:] = [(names, group) for names, group in kept if names]


def exchanged(tensors: Mapping[str, Tensor]) -> None:
    """Give each of two ranks the other's tensors, where they fit."""
    found = of_others({name: local(tensor).detach().clone() for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        other = found[1 - dist.get_rank()][name]
        if other.shape == local(tensor).shape:
            local(tensor.detach()).copy_(other)


AFTER_ATTENTION = r"model\.layers\..|model\.norm|lm_head"
"""Activations of all that comes after the first attention."""
HEAD_NORMS = r".*\.[qk]_norm\.weight"
EXPERTS = r".*\.experts\..*"
MOMENTS = r".*/exp_avg(_sq)?"
EMBEDDED = r"model\.embed_tokens\.weight"
