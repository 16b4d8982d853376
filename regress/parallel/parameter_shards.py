"""Part of a parameter on this rank, whichever strategies split it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regress.dump.tensor_placements import local, of, part
from regress.layout import ShardLayout

__all__ = ["like", "local", "of", "part", "project"]


def like(parameter: Tensor, full: Tensor) -> Tensor:
    """Return a whole tensor (the same on every rank), split like the parameter; it shares no memory with ``full``.

    Raises:
        ValueError: if the two have different shapes.
    """
    if full.shape != parameter.shape:
        raise ValueError(
            f"a tensor of shape {list(full.shape)} cannot be split as a parameter of shape {list(parameter.shape)} is"
        )
    mine = project(of(parameter), full).to(parameter.device, parameter.dtype, copy=True).contiguous()
    if not isinstance(parameter, DTensor):
        return mine
    return DTensor.from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def project(layout: ShardLayout, full: Tensor) -> Tensor:
    """Apply `ShardLayout.project` to a torch tensor of any device."""
    for dim, ranges in enumerate(layout.ranges):
        parts = [full.narrow(dim, start, stop - start) for start, stop in ranges] or [full.narrow(dim, 0, 0)]
        full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return full
