"""A run on a rank, which imports this file by name, and the threads that it leaves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor

from regress.engine.config import load_config
from regress.parallel.distributed_ranks import opened_world


def threads() -> int:
    """Return the number of gloo's threads in this process."""
    return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def opened_and_closed() -> tuple[int, int]:
    """Return the threads within a run of two ranks, and after it."""
    distributed.destroy_process_group()  # that of the pool
    with opened_world(load_config(overrides=["parallel.fsdp=2"], environ={}).config) as world:
        distribute_tensor(torch.ones(4), world.device_mesh["fsdp"], [Shard(0)]).sum().full_tensor()
        within = threads()
    return within, threads()
