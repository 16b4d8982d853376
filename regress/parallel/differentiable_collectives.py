"""Collectives as differentiable functions of one rank's tensors.

gloo silently writes into dense tensors of any strides as if they were contiguous; every tensor that goes to
or comes from a collective here is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None
Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return the function excluded from compilation: its ranks must meet, whatever each of them compiles."""
    same: Function = torch.compiler.disable(function)
    return same


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


@uncompiled
def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange ``[sum(sent), ...]`` for ``[sum(received), ...]``: ``sent[i]`` rows, in order, go to rank
    ``i`` of the group.
    """
    out: Tensor = _Rows.apply(rows, sent, received, group)
    return out


def swap(parts: Tensor, group: Group) -> Tensor:
    """Send part ``i`` of ``[ranks, ...]`` to rank ``i``, and put that rank's part for this rank in its place."""
    ones = [1] * len(parts)
    return exchange(parts, ones, ones, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, group: Group) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        out = tensor.new_empty(ranks, *tensor.shape)
        dist.all_gather(list(out.unbind()), tensor.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ones = [1] * ctx.ranks
        parts = _all_to_all(grad, ones, ones, ctx.group)
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return parts.sum(0, dtype=wide).to(grad.dtype), None, None


@uncompiled
def gather(tensor: Tensor, ranks: int, group: Group) -> Tensor:
    """Return the tensors of all ranks, ``[ranks, *shape]``; gradients are added in rank order, in float32
    or wider.
    """
    out: Tensor = _Gather.apply(tensor, ranks, group)
    return out


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
