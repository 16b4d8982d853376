"""Gradients and moments of whole parameters, of a distributed optimizer gathered from the ranges of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def finalized_gradients(
    chunks: Sequence[Any], names: Mapping[str, Any], *, distributed: bool
) -> dict[str, Any]:
    """Return the finalized gradient of each parameter on this rank.

    Args:
        chunks: stages of the model, each in Megatron's DDP.
        names: parameters by name.
        distributed: the optimizer is distributed, so that a rank has its own range of each bucket only.
    """
    if not distributed:
        return {name: p.main_grad.detach().clone() for name, p in names.items()}
    from torch import distributed as collectives

    found: dict[Any, Any] = {}
    for chunk in chunks:
        for buffer in chunk.buffers:
            whole = buffer.grad_data.clone()
            for bucket in buffer.buckets:
                start, size = bucket.offset, bucket.grad_data.numel()
                parts = list(whole[start : start + size].chunk(buffer.data_parallel_world_size))
                own = parts[collectives.get_rank(buffer.data_parallel_group)].clone()
                collectives.all_gather(parts, own, group=buffer.data_parallel_group)
            for p, (start, stop, _) in buffer.param_index_map.items():
                found[p] = whole[start:stop].view(p.shape)
    return {name: found[p] for name, p in names.items()}


def moment(optimizers: Sequence[Any], p: Any, key: str, *, distributed: bool) -> Any:
    """Return a moment of a parameter, as `exp_avg`.

    Args:
        optimizers: those of the run, of which one holds the parameter.
        distributed: they are distributed, so that a rank has its own range of the moment only.
    """
    if not distributed:
        return next(one.optimizer.state[p][key] for one in optimizers if p in one.optimizer.state)
    import torch
    from megatron.core import parallel_state as ranks

    found = torch.zeros(p.numel())
    for one in optimizers:
        if p in one.model_param_group_index_map:
            group, order = one.model_param_group_index_map[p]
            own = one._get_model_param_range_map(p)["param"]
            main = one.optimizer.param_groups[group]["params"][order]
            found[own.start : own.end] = one.optimizer.state[main][key]
    torch.distributed.all_reduce(found, group=ranks.get_data_parallel_group())
    return found.view(p.shape)
