"""Tensor-parallel styles for the factors of a low-rank adapter, whose layer is split over ranks.

The adapter of a layer that is split by outputs has a whole A, and of B the rows of the rank's outputs; that of a layer
that is split by inputs has of A the columns of the rank's inputs, and a whole B. The sum over ranks, or the gradient
that has to be summed, is that of the ``r`` values between the two.
"""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import linear

from regress.engine.local_tensor import local
from regress.parallel.conv1d_styles import split_parameter


class OutputFactor(ParallelStyle):
    """Splits the rows of B.

    Args:
        input_layout: placement of the ``r`` values: whole, or a part of the columns of tokens.
        fused: number of weights side by side in the layer, of each of which the rank has its part.
    """

    def __init__(self, input_layout: Placement, fused: int = 1) -> None:
        super().__init__()
        self.input_layout = input_layout
        self.fused = fused

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameter(module, "weight", device_mesh, 0, self.fused)
        module.forward = functools.partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [self.input_layout], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return linear(whole.to_local(grad_placements=[Partial()]), _weight(module))


class InputFactor(ParallelStyle):
    """Splits the columns of A and sums the ``r`` values.

    Args:
        output_layout: placement of the ``r`` values: whole, or a part of the columns of tokens.
    """

    def __init__(self, output_layout: Placement) -> None:
        super().__init__()
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameter(module, "weight", device_mesh, 1, 1)
        module.forward = functools.partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        partial = DTensor.from_local(linear(x, _weight(module)), mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[self.output_layout]).to_local()


class WholeFactor(ParallelStyle):
    """Leaves A whole, and takes the layer's input as a plain tensor: its gradient is whole, too."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: tuple(local(value) for value in args))
        return module


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return local(weight)
