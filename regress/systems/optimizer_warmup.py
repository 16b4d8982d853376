"""The recorded state of the optimizer, put into that of a system."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regress.dump.tensor_placements import of
from regress.errors import SystemsError
from regress.replay.exported_case import ExportedCase

MOMENTS = ("exp_avg", "exp_avg_sq")


def put_state(optimizer: Any, model: nn.Module, case: ExportedCase) -> None:
    """Give an AdamW the recorded moments and step counts; distributed parameters get their shards.

    Args:
        optimizer: with ``param_groups`` and ``state`` of torch, wrapped or not.
        model: its parameters by name; names of wrappers in front are taken off.

    Raises:
        SystemsError: if the case has no state of a parameter, or one of another shape.
    """
    moments = load_file(case.folder / "optimizer.safetensors")
    steps = case.optimizer_steps
    for name, p in plain_names(model).items():
        if not any(p is own for group in optimizer.param_groups for own in group["params"]):
            continue
        if name not in steps:
            raise SystemsError(f"{case.name} has no optimizer state of {name}: leave Cell.warm False")
        state = {key: _like(moments[f"{name}/{key}"].to(p.dtype), p, name) for key in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(float(steps[name])), **state}


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the checkpoint."""
    return {name.removeprefix("module.").replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def _like(value: Tensor, p: Any, name: str) -> Tensor:
    if hasattr(p, "placements"):
        local = torch.from_numpy(of(p).project(value.numpy()).copy())
        found: Tensor = DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        return found
    if value.shape != p.shape:
        raise SystemsError(f"""{name} is held as {list(p.shape)} of {list(value.shape)}, and nothing tells which part:
        leave Cell.warm False""")
    return value.clone()
