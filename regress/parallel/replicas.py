"""Replicas of a model under torch's DistributedDataParallel, as torch or accelerate sets it up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from regress.parallel.world import ProcessWorld

DIMENSIONS = ("dp", "cp")


@dataclass(frozen=True)
class Replicas:
    """A wrapped model.

    Attributes:
        module: what is called in place of the model.
        size: replicas, over which gradients are averaged.
        no_sync: around the passes of a microbatch that is not the last.
        backward: the backward pass.
    """

    module: nn.Module
    size: int
    no_sync: Callable[[], AbstractContextManager[None]]
    backward: Callable[[Tensor], None]


def replicated(model: PreTrainedModel, world: ProcessWorld) -> Replicas | None:
    """The model under the wrapper that the configuration names; None if gradients are summed without one."""
    chosen = world.config.data_parallel
    size = world.size(*DIMENSIONS)
    if chosen not in ("ddp", "accelerate") or size == 1:
        return None
    if chosen == "accelerate":
        return _accelerate(model, size)
    module = DistributedDataParallel(model, process_group=world.group(*DIMENSIONS))
    return Replicas(module, size, module.no_sync, lambda loss: loss.backward())


def _accelerate(model: PreTrainedModel, size: int) -> Replicas:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=model.device.type == "cpu")
    module = accelerator.prepare_model(model)
    return Replicas(module, size, lambda: accelerator.no_sync(module), accelerator.backward)
