"""Optimizer and learning-rate schedule, as Hugging Face users know them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from regress.engine.config.schema import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with the configured constants on all parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, updates: int
) -> LRScheduler:
    """Schedule over ``updates`` optimizer updates: constant, linear or cosine, after a linear warm-up."""
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    scheduler: LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=updates
    )
    return scheduler
