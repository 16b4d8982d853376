"""Optimizer and learning-rate schedule, with the names that Hugging Face users know."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from regress.engine.config.training_config import OptimizerConfig
from regress.engine.local_tensor import mesh_of
from regress.errors import RegressError, reason


def adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    learning_rate: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    implementation: str = "auto",
) -> torch.optim.AdamW:
    """Return AdamW over all parameters, by name.

    Plain and distributed parameters are separate groups, since torch updates no list of both at once.
    ``implementation`` is ``"for_loop"``, ``"foreach"``, ``"fused"``, or ``"auto"`` for torch's choice.
    """
    groups: dict[object, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        groups.setdefault(mesh_of(parameter), []).append((name, parameter))
    flags = {} if implementation == "auto" else {n: n == implementation for n in ("foreach", "fused")}
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()] or [{"params": []}],  # a stage with nothing to train
        lr=learning_rate,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        **flags,
    )


def update(optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters once.

    Raises:
        RegressError: if torch cannot take the learning rate or another setting of the optimizer.
    """
    try:
        optimizer.step()
    except RuntimeError as error:  # such as a learning rate that is no float32
        group = optimizer.param_groups[0]
        settings = ", ".join(f"{name} {group[name]:g}" for name in ("lr", "eps", "weight_decay"))
        raise RegressError(f"""the optimizer cannot make an update with {settings} ({reason(error)}); set the learning
        rate and the rest of section optimizer to usual sizes""") from error


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, updates: int
) -> LRScheduler:
    """Return a schedule over ``updates`` optimizer updates: constant, linear or cosine, after a linear warm-up."""
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    scheduler: LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=updates
    )
    return scheduler
