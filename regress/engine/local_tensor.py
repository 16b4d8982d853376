"""The part of a distributed tensor that lies on this rank."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(value: Tensor) -> Tensor:
    """Return the local tensor of a `DTensor`, which shares its memory; any other tensor unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def mesh_of(value: Tensor) -> DeviceMesh | None:
    """Return the device mesh of a `DTensor`; None for any other tensor."""
    return value.device_mesh if isinstance(value, DTensor) else None
