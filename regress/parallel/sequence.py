"""Sequence parallelism between blocks: each rank of a tensor-parallel group holds a part of the columns."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput

from regress.errors import ConfigError

SEQUENCE = Shard(1)


class SplitSequence(ParallelStyle):
    """The module gets this rank's columns of its first argument, ``[B, T, H]``; its gradient is gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(functools.partial(_split, device_mesh))
        return module


def gather_sequence() -> ParallelStyle:
    """The module's output is gathered from all ranks; each gets its own columns of the gradient."""
    return PrepareModuleOutput(output_layouts=SEQUENCE, desired_output_layouts=Replicate())


def _split(mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *rest = args
    if hidden.shape[1] % mesh.size():
        raise ConfigError(
            f"parallel.sequence_parallel=true: rows of {hidden.shape[1]} columns cannot be split over {mesh.size()} "
            f"ranks; set batching.pad_to_multiple_of to a multiple of {mesh.size()}"
        )
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return (whole.redistribute(placements=[SEQUENCE]).to_local(), *rest)
