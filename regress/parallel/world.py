"""The ranks of a run over torch.distributed, on one machine or many."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from regress.engine.config.schema import Config, ParallelConfig
from regress.engine.policy import LocalPolicy
from regress.engine.world import Alone, World
from regress.errors import ConfigError, reason
from regress.layout import DIMENSIONS, Mesh, RankPlan

TIMEOUT = 600.0
"""Seconds after which a rank that waits for the others gives up, unless REGRESS_COLLECTIVE_TIMEOUT says otherwise."""


TOKENS = ("pp", "dp", "fsdp", "ep", "cp")
"""Dimensions whose ranks compute the loss of different tokens, or of none."""


class ProcessWorld:
    """One of several processes; see `regress.engine.world.World`.

    Attributes:
        rank: among all processes.
        config: what is split, and how.
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
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        for dimensions in (("pp",), ("cp",), ("tp",), ("dp", "cp"), TOKENS):
            self.group(*dimensions)  # now, because later not all ranks may come to the place that asks

    @property
    def main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def mesh(self) -> Mesh:
        """Extents of the dimensions."""
        return self.plan.mesh

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks but those of a tensor-parallel group, which hold the same tokens."""
        group = self.group(*TOKENS)
        if group is not None:
            values = values.contiguous()
            dist.all_reduce(values, group=group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, pickled."""
        found: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(found, value)
        return found

    def group(self, *dimensions: str) -> ProcessGroup | None:
        """The process group along some dimensions; None if this rank is alone in it. All ranks ask for it at once."""
        if dimensions not in self._groups:
            seen = {self.mesh.group(rank, *dimensions) for rank in range(self.mesh.world_size)}
            own: ProcessGroup | None = None
            for ranks in sorted(seen):
                made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
                own = made if self.rank in ranks else own
            self._groups[dimensions] = own
        return self._groups[dimensions]

    def size(self, *dimensions: str) -> int:
        """Ranks in the group along some dimensions."""
        return len(self.mesh.group(self.rank, *dimensions))

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """The model, split over the ranks."""
        from regress.parallel.policy import ParallelPolicy

        return ParallelPolicy(model, self, **settings)


def rank_plan(config: ParallelConfig) -> RankPlan:
    """The ranks that a configuration asks for."""
    return RankPlan(
        Mesh(**{name: getattr(config, name) for name in DIMENSIONS}),
        sample_split=config.sample_split,
        sequence_split=config.cp_split,
        sequence_parallel=config.sequence_parallel,
    )


@contextmanager
def opened_world(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[World]:
    """The ranks of a run: this process alone, or those that a launcher has started.

    torchrun, accelerate launch and the like tell a process its rank in environment variables (RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The process group is closed in the end.

    Raises:
        ConfigError: if there are not as many processes as ``parallel`` asks for, or they do not find one another.
    """
    wanted = rank_plan(config.parallel).mesh
    started = int(environ.get("WORLD_SIZE", "1"))
    if started != wanted.world_size:
        raise ConfigError(_wrong_number(wanted, started))
    if wanted.world_size == 1:
        yield Alone()
        return
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    seconds = float(environ.get("REGRESS_COLLECTIVE_TIMEOUT", TIMEOUT))
    owned = not dist.is_initialized()  # whoever has started one closes it
    if owned:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the {started} processes of this run do not find one another ({reason(error)}); start them with "
                f"torchrun --nproc-per-node {started}, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE"
            ) from error
    try:
        yield ProcessWorld(config.parallel, device)
    finally:
        if owned:
            dist.destroy_process_group()


def _wrong_number(mesh: Mesh, started: int) -> str:
    asked = (
        " * ".join(f"parallel.{name}={size}" for name, size in mesh.sizes.items() if size > 1) or "parallel"
    )
    verb = "was" if started == 1 else "were"
    remedy = (
        f"start them with torchrun --nproc-per-node {mesh.world_size} -m regress train ..."
        if mesh.world_size > 1
        else "set extents in parallel whose product is that number, such as parallel.dp"
    )
    plural = "process" if mesh.world_size == 1 else "processes"
    return f"{asked} asks for {mesh.world_size} {plural}, and {started} {verb} started; {remedy}"
