"""Taps of tensors that lie on many ranks, on a rank, which imports this file by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from regress.dump import Recorder, at, recording, tap


def refused(folder: Path) -> list[str]:
    """Return the errors of taps of a DTensor and of a parameter that is one; its local part is recorded."""
    errors = []
    part = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with recording(Recorder(folder, options={"param": True})), at(step=0, rank=0):
        for value in (part, torch.nn.Parameter(part)):
            try:
                tap("param", **{"model.weight": value})
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        tap("param", **{"model.weight": part.to_local()})
    return errors
