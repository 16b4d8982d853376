"""Sums of gradients over the ranks that each hold part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from regress.engine.local_tensor import local


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Place every gradient like its parameter: some operations leave whole gradients of sharded parameters."""
    for parameter in parameters:
        grad = parameter.grad
        if (
            isinstance(grad, DTensor)
            and isinstance(parameter, DTensor)
            and grad.placements != parameter.placements
        ):
            parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)


def sum_gradients(
    parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
) -> None:
    """Sum the gradients of the named parameters, one collective for each group and dtype.

    A missing gradient counts as zeros: another rank may have one. All ranks of a group name the same
    parameters in the same order. The sum is the same, bit for bit, on all of them.
    """
    for names, group in groups:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(local(parameter.grad))
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))
