"""Token embeddings split over the vocabulary.

torch's `RowwiseParallel` computes the same, but leaves every rank the gradient of the whole vocabulary (torch 2.13:
``weight.grad`` is replicated, ``weight`` split).
"""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import embedding

from regress.parallel import shards


class VocabularyParallel(ParallelStyle):
    """Each rank looks up the ids of its own rows, as `torch.chunk` cuts them; the results are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=module.weight.requires_grad))
        ranges = shards.of(weight).ranges[0]
        rows = ranges[0] if ranges else (0, 0)
        module.forward = functools.partial(_look_up, module, device_mesh, rows)  # type: ignore[method-assign]
        return module


def _look_up(module: nn.Embedding, mesh: DeviceMesh, rows: tuple[int, int], ids: Tensor) -> Tensor:
    start, stop = rows
    weight: Tensor = module.weight
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
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
