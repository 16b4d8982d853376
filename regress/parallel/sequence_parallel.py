"""Sequence parallelism: between its matrix products a block works on this rank's part of the columns."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from regress.errors import ConfigError

SEQUENCE = Shard(1)


def work_on_own_columns(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Make hidden states ``[B, T / tp, H]`` from the first argument of ``first`` to the output of ``last``.

    Before and after these modules, hidden states and their gradients are whole on every rank.
    """
    first.register_forward_pre_hook(functools.partial(_split, mesh.get_group()))
    last.register_forward_hook(functools.partial(_gather, mesh.get_group()))


def _split(group: dist.ProcessGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *rest = args
    if hidden.shape[1] % group.size():
        raise ConfigError(f"""parallel.sequence_parallel=true: rows of {hidden.shape[1]} columns cannot be split over
        {group.size()} ranks; set batching.pad_to_multiple_of to a multiple of {group.size()}""")
    return (_Split.apply(hidden, group), *rest)


def _gather(group: dist.ProcessGroup, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
    return _Gather.apply(output, group)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_columns(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_columns(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_columns(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_columns(grad, ctx.group), None


def _own_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), dim=1)[group.rank()].clone(memory_format=torch.contiguous_format)


def _all_columns(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=1)
