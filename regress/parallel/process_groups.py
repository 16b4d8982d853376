"""Process groups of a run: the mesh of its processes, and the groups along its dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from regress.engine.config.batching_config import ParallelConfig
from regress.layout import DIMENSIONS, Mesh, RankPlan

TOKENS = ("pp", "dp", "fsdp", "ep", "cp")
"""Dimensions along which ranks compute the loss of different tokens, or of none."""


class ProcessGroups:
    """Process groups of one rank along the dimensions of the mesh.

    Attributes:
        rank: index among all processes.
        config: extents and settings of the split.
        plan: the mesh and the split of samples and tokens.
        device_mesh: the same mesh for torch, its dimensions named.
    """

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config = config
        self.plan = rank_plan(config)
        self.rank = dist.get_rank()
        self.device = device
        mesh = self.plan.mesh
        self.device_mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(mesh.sizes[name] for name in DIMENSIONS), mesh_dim_names=DIMENSIONS
        )
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        for dimensions in (("dp", "cp"), TOKENS):
            self.group(*dimensions)  # now, because later not all ranks may make this call

    @property
    def main(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    @property
    def mesh(self) -> Mesh:
        """Extents of the dimensions."""
        return self.plan.mesh

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks except those of a tensor-parallel group, which hold the same tokens."""
        group = self.group(*TOKENS)
        if group is not None:
            values = values.contiguous()
            dist.all_reduce(values, group=group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, pickled."""
        found: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(found, value)
        return found

    def group(self, *dimensions: str) -> ProcessGroup | None:
        """Return the process group along some dimensions; None if this rank is alone in it. All ranks call
        this together.
        """
        split = tuple(name for name in DIMENSIONS if name in dimensions and self.mesh.sizes[name] > 1)
        if len(split) < 2:
            return self.device_mesh.get_group(split[0]) if split else None
        if split not in self._groups:
            for ranks in sorted({self.mesh.group(rank, *split) for rank in range(self.mesh.world_size)}):
                made = dist.new_group(list(ranks))
                if self.rank in ranks:
                    self._groups[split] = made
        return self._groups[split]

    def clear(self) -> None:
        """Release all process groups, once they are destroyed."""
        self._groups.clear()
        # torch 2.13: caches of DTensor keep meshes, and meshes their groups; see docs/findings.md
        getattr(self.device_mesh, "_pg_registry", {}).clear()

    def size(self, *dimensions: str) -> int:
        """Return the number of ranks in the group along some dimensions."""
        return len(self.mesh.group(self.rank, *dimensions))


def rank_plan(config: ParallelConfig) -> RankPlan:
    """Return the ranks that a configuration asks for."""
    return RankPlan(
        Mesh(**{name: getattr(config, name) for name in DIMENSIONS}),
        sample_split=config.sample_split,
        sequence_split=config.cp_split,
        sequence_parallel=config.sequence_parallel,
    )
