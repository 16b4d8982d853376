"""Part of a distributed tensor on this rank, read from its placements."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from regress.layout import ShardLayout


def of(tensor: Tensor) -> ShardLayout:
    """Return the layout of the local part of a parameter (or of its gradient); a plain tensor is whole.

    FSDP splits the part that tensor parallelism leaves on the rank, so it comes last where both split one
    dimension.

    Raises:
        ValueError: if the tensor is a partial sum, which no part of the whole tensor is equal to.
    """
    layout = ShardLayout.whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return layout
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a tensor placed as {placements} is not a part of the whole one; sum it over the ranks first"
        )
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "the rank is not on the tensor's mesh"
    splits = [index for index, placement in enumerate(placements) if _dimension(placement) is not None]
    for index in sorted(splits, key=lambda index: _splits_a_part(placements, index)):
        placement = placements[index]
        assert isinstance(placement, Shard | _StridedShard)
        fused = 1
        if isinstance(placement, _StridedShard) and not _splits_a_part(placements, index):
            fused = int(placement.split_factor)
        count = tensor.device_mesh.size(index)
        layout = part(layout, placement.dim, index=coordinates[index], count=count, fused=fused)
    return layout


def part(layout: ShardLayout, dim: int, *, index: int, count: int, fused: int = 1) -> ShardLayout:
    """Return part ``index`` of ``count`` of a layout along ``dim``, as `torch.chunk` cuts it.

    Of ``fused`` weights side by side (queries, keys and values) it holds that part of each.
    """
    whole = ShardLayout.whole(layout.local_shape)
    size = layout.local_shape[dim] // fused
    step = -(-size // count)
    start, stop = min(index * step, size), min((index + 1) * step, size)
    cut = tuple((at * size + start, at * size + stop) for at in range(fused)) if start < stop else ()
    return ShardLayout(whole.shape, (*whole.ranges[:dim], cut, *whole.ranges[dim + 1 :])).inside(layout)


def local(tensor: Tensor) -> Tensor:
    """Return the local part as a plain tensor that shares its memory; no collective."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _dimension(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def _splits_a_part(placements: tuple[Placement, ...], index: int) -> bool:
    """Return True if this placement splits what later ones leave of the dimension: FSDP over tensor parallelism."""
    later = [_dimension(placement) for placement in placements[index + 1 :]]
    return isinstance(placements[index], _StridedShard) and _dimension(placements[index]) in later
