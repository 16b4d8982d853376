"""Tensor-parallel styles for GPT-2's `Conv1D`, a linear layer whose weight is ``[in, out]``; torch has none."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from regress.engine.local_tensor import local
from regress.parallel import parameter_shards


class ColwiseConv(ParallelStyle):
    """Splits the outputs; of ``fused`` weights side by side, the outputs of each.

    Args:
        input_layout: placement of the input: whole, or a part of the columns.
        fused: number of weights side by side.
    """

    def __init__(self, input_layout: Placement, fused: int = 1) -> None:
        super().__init__()
        self.input_layout = input_layout
        self.fused = fused

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in (("weight", 1), ("bias", 0)):
            split_parameter(module, name, device_mesh, dim, self.fused)
        module.forward = functools.partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [self.input_layout], run_check=False).redistribute(
            placements=[Replicate()]
        )
        mine = whole.to_local(grad_placements=[Partial()])
        return _product(mine, _plain(module.weight)) + _plain(module.bias)


class RowwiseConv(ParallelStyle):
    """Splits the inputs and sums the outputs; the bias stays whole on every rank.

    Args:
        output_layout: placement of the output: whole, or a part of the columns.
    """

    def __init__(self, output_layout: Placement) -> None:
        super().__init__()
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameter(module, "weight", device_mesh, 0, 1)
        module.forward = functools.partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        partial = DTensor.from_local(_product(x, _plain(module.weight)), mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[self.output_layout]).to_local() + _plain(module.bias)


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int, fused: int) -> None:
    """Keep this rank's part of a parameter along ``dim``; of ``fused`` weights side by side, its part of each."""
    whole = module.get_parameter(name)
    layout = parameter_shards.part(
        parameter_shards.of(whole), dim, index=mesh.get_local_rank(), count=mesh.size(), fused=fused
    )
    placement = Shard(dim) if fused == 1 else _StridedShard(dim, split_factor=fused)
    own = parameter_shards.project(layout, whole.detach()).clone(memory_format=torch.contiguous_format)
    split = DTensor.from_local(
        own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def _plain(parameter: Tensor | nn.Module) -> Tensor:
    assert isinstance(parameter, Tensor)
    return local(parameter)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = x.flatten(0, -2) @ weight
    return product.view(*x.shape[:-1], -1)
