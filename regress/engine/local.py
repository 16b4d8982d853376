"""The part of a distributed tensor that lies on this rank."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(value: Tensor) -> Tensor:
    """The local tensor of a `DTensor`, which shares its memory; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
