"""State of an optimizer: gathered whole from all ranks, and handed back to them in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from regress.dump.arrays import Array, to_numpy, to_torch
from regress.engine.adapters.parameters import trained_parameters
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.world import World
from regress.errors import CheckpointError
from regress.layout import ShardLayout

Part = tuple[ShardLayout | None, Array]


def whole_state(
    optimizer: Optimizer, policy: LocalPolicy, world: World
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of every parameter as whole tensors ``<parameter>/<state>``, and the states that are none.

    All ranks call this together; only the first gets the tensors, which are copies.
    """
    tensors: dict[str, Part] = {}
    others: dict[str, Any] = {}
    for name, parameter in policy.named_parameters():
        if name not in policy.owned:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                split = local(value).shape == local(parameter).shape and value.dim() > 0
                tensors[f"{name}/{key}"] = _part(policy, name, value, split=split)
            else:
                others[f"{name}/{key}"] = value
    rest = {key: value for found in world.gather(others) for key, value in found.items()}
    return {name: to_torch(array) for name, array in _assembled(tensors, world).items()}, rest


def _part(policy: LocalPolicy, name: str, value: Tensor, *, split: bool) -> Part:
    return (policy.shard(name) if split else None), to_numpy(local(value).detach(), name)


def _assembled(own: dict[str, Part], world: World) -> dict[str, Array]:
    """Return whole tensors from the parts of all ranks, on the first; nothing on the others."""
    if world.plan.mesh.world_size == 1:
        return {name: array for name, (_, array) in own.items()}
    parts = world.gather(own)
    if not world.main:
        return {}
    whole: dict[str, Array] = {}
    for part in parts:
        for name, (shard, array) in part.items():
            if shard is None:
                whole[name] = array
                continue
            full = whole.setdefault(name, np.zeros(shard.shape, array.dtype))
            shard.gather(array, full)
    return whole


def load_whole(
    optimizer: Optimizer,
    policy: LocalPolicy,
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Any],
    stated: str,
) -> None:
    """Put a state that `whole_state` returned into the optimizer: on each rank its part.

    Args:
        tensors, others: what it returned.
        stated: name of the checkpoint, for errors.

    Raises:
        CheckpointError: if it is the state of other parameters.
    """
    named = dict(policy.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(policy.architecture)}
    found: dict[str, dict[str, Any]] = {}
    for full, value in (*tensors.items(), *others.items()):
        name, _, key = full.rpartition("/")
        if name not in shapes:
            raise CheckpointError(
                f"{stated}: its optimizer has a state of {name}, which is no parameter of this model; resume with the "
                "model that wrote it"
            )
        found.setdefault(name, {})[key] = value
    optimizer.state.clear()
    for name, parameter in named.items():
        for key, value in found.get(name, {}).items():
            if isinstance(value, Tensor):
                value = _own(policy, name, key, value, shapes[name], stated)
            optimizer.state[parameter][key] = value
    _place(optimizer)


def _own(
    policy: LocalPolicy, name: str, key: str, value: Tensor, shape: tuple[int, ...], stated: str
) -> Tensor:
    """Return this rank's part of a state tensor, on the CPU or placed like the parameter."""
    if not value.dim():
        return value
    if value.shape != shape:
        if policy.shard(name) is None:
            return value  # such as the factors of a factored moment
        raise CheckpointError(
            f"{stated}: the optimizer's {name}/{key} has shape {list(value.shape)} for a parameter of shape "
            f"{list(shape)}, so no rank's part of it is known; resume with parallel.* that leave parameters whole"
        )
    part = policy.part(name, value)
    if part.dtype != value.dtype:
        raise CheckpointError(
            f"{stated}: the optimizer's {name}/{key} is {value.dtype} and its parameter {part.dtype}, so it cannot be "
            "split over ranks; resume with parallel.* that leave parameters whole"
        )
    return part


def _place(optimizer: Optimizer) -> None:
    """Move each state to where the optimizer wants it; a fused one keeps its step counts beside the parameters."""
    for group in optimizer.param_groups:
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (value.dim() or beside):
                    optimizer.state[parameter][key] = value.to(parameter.device)
