"""Token embeddings and output projections split over the vocabulary, as `torch.chunk` cuts it.

torch's own styles compute the same, but `RowwiseParallel` leaves every rank the gradient of the whole vocabulary (torch
2.13: ``weight.grad`` is replicated, ``weight`` split), and `ColwiseParallel` returns a view, which FSDP warns of.
"""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import embedding, linear

from regress.engine.local_tensor import local
from regress.parallel import parameter_shards


class SplitEmbedding(ParallelStyle):
    """Each rank looks up the ids of its own rows; the results are summed, and whole on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _split_rows(module, device_mesh)
        module.forward = functools.partial(_look_up, module, device_mesh)  # type: ignore[method-assign]  # torch calls it
        return module


class SplitProjection(ParallelStyle):
    """Each rank projects the whole hidden states onto its own rows of the weight."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _split_rows(module, device_mesh)
        module.forward = functools.partial(_project, module, device_mesh)  # type: ignore[method-assign]  # torch calls it
        return module


def _split_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, whole in list(module.named_parameters()):
        split = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def _look_up(module: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    start, stop = rows_of(module.weight)
    weight = local(module.weight)
    if start == stop:  # no row at all; the gradient is as empty
        found = weight.sum() + weight.new_zeros(*ids.shape, module.embedding_dim)
    else:
        elsewhere = (ids < start) | (ids >= stop)
        padding = module.padding_idx
        padding = padding - start if padding is not None and start <= padding < stop else None
        found = embedding((ids - start).masked_fill(elsewhere, 0), weight, padding)
        found = found.masked_fill(elsewhere[..., None], 0)
    whole = DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(
        placements=[Replicate()]
    )
    return whole.to_local()


def _project(module: nn.Linear, mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    mine = whole.to_local(grad_placements=[Partial()])
    return linear(mine, local(module.weight), None if module.bias is None else local(module.bias))


def rows_of(weight: Tensor) -> tuple[int, int]:
    """Return ``(start, stop)`` of the rows on this rank, without regard to FSDP; ``(V, V)`` where there are none."""
    ranges = parameter_shards.of(weight).ranges[0]
    return ranges[0] if ranges else (len(weight), len(weight))
