"""The part of a distributed tensor that lies on this rank."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(value: Tensor) -> Tensor:
    """The local tensor of a `DTensor`, which shares its memory; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def mesh_of(value: Tensor) -> DeviceMesh | None:
    """The ranks that a `DTensor` lies on; None for any other tensor."""
    return value.device_mesh if isinstance(value, DTensor) else None
