"""Replicas of a model under torch's DistributedDataParallel, as torch or accelerate sets it up."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from regress.engine.user_components import own_wrapper
from regress.errors import ConfigError
from regress.parallel.process_groups import ProcessGroups

DIMENSIONS = ("dp", "cp")
PLUGINS = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"),
    *("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"),
)
"""Variables by which ``accelerate launch`` asks for something other than replicas."""


@dataclass(frozen=True)
class Replicas:
    """Wrapped model with its backward pass.

    Attributes:
        module: module to call in place of the model.
        size: replicas, over which gradients are averaged.
        no_sync: around the passes of a microbatch that is not the last.
        backward: the backward pass.
    """

    module: nn.Module
    size: int
    no_sync: Callable[[], AbstractContextManager[None]]
    backward: Callable[[Tensor], None]


def replicated(model: PreTrainedModel, world: ProcessGroups) -> Replicas | None:
    """Return the model under the wrapper that the configuration names; None if gradients are summed without one."""
    chosen = world.config.data_parallel
    size = world.size(*DIMENSIONS)
    if chosen not in ("ddp", "accelerate") or size == 1:
        return None
    if chosen == "accelerate":
        return _accelerate(model, size)
    if world.config.wrapper is not None:
        own: Any = own_wrapper(model, world.group(*DIMENSIONS), world.config.wrapper)
        return Replicas(own, size, own.no_sync, lambda loss: loss.backward())
    module = distributed(model, world.group(*DIMENSIONS))
    return Replicas(module, size, module.no_sync, lambda loss: loss.backward())


def distributed(model: nn.Module, group: Any) -> DistributedDataParallel:
    """Return torch's wrapper of a model for the processes of a group; also what ``parallel.wrapper`` may name."""
    return DistributedDataParallel(model, process_group=group)


def _accelerate(model: PreTrainedModel, size: int) -> Replicas:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    for name in PLUGINS:
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(f"""parallel.data_parallel=accelerate wraps whole models for replicas, and accelerate
            launch asks for another engine ({name}=true); start it with --multi_gpu and nothing else, and set
            parallel.fsdp for shards""")
    # settings in the launcher's variables or configuration file would silently change the computation
    accelerator = Accelerator(
        cpu=model.device.type == "cpu",
        mixed_precision="no",
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    module = accelerator.prepare_model(model)
    return Replicas(module, size, lambda: accelerator.no_sync(module), accelerator.backward)
