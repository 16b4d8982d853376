"""Plants in DeepSpeed's engine, its ZeRO optimizers and AutoTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from plants.rewriting import rewritten


@contextmanager
def accumulation_not_divided() -> Iterator[None]:
    """Do not divide the loss by the microbatches of a window."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = "loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss"
    with rewritten(DeepSpeedEngine.backward, {before: "loss = loss * 1"}):
        yield


@contextmanager
def gradients_not_reduced() -> Iterator[None]:
    """Leave every rank its own gradients, divided by the ranks."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    before = "dist.all_reduce(tensor_to_allreduce, group=process_group)"
    with rewritten(DeepSpeedZeroOptimizer.allreduce_bucket, {before: "pass"}):
        yield


@contextmanager
def replicated_norms_not_summed() -> Iterator[None]:
    """Do not sum the gradients of norms that tensor ranks have from their own heads."""
    from deepspeed.module_inject.auto_tp import AutoTP

    with patch.object(AutoTP, "register_replicated_grad_hooks", lambda self, model: None):
        yield


@contextmanager
def norm_of_this_rank_only() -> Iterator[None]:
    """Clip by the norm of this rank's part of the gradients."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    before = "dist.all_reduce(total_norm, op=dist.ReduceOp.SUM, group=self.dp_process_group)"
    with rewritten(DeepSpeedZeroOptimizer.get_grad_norm_direct, {before: "pass"}):
        yield


@contextmanager
def parameters_not_gathered() -> Iterator[None]:
    """Leave on every rank the old values of the parameters that other ranks updated."""
    from deepspeed.runtime.zero import stage_1_and_2

    with patch.object(stage_1_and_2, "all_gather_dp_groups", lambda **options: None):
        yield


@contextmanager
def reduced_in_bfloat16() -> Iterator[None]:
    """Add gradients of ranks in bfloat16, where float32 was asked for."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    before = "tensor_to_allreduce = tensor\n"
    after = "tensor_to_allreduce = tensor\n    communication_data_type = torch.bfloat16\n"
    with rewritten(DeepSpeedZeroOptimizer.allreduce_bucket, {before: after}):
        yield


@contextmanager
def reduced_and_broadcast() -> Iterator[None]:
    """Reduce gradients to one rank and send them from there."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    before = "dist.all_reduce(tensor_to_allreduce, group=process_group)"
    after = (
        "first = dist.get_global_rank(process_group, 0); "
        "dist.reduce(tensor_to_allreduce, first, group=process_group); "
        "dist.broadcast(tensor_to_allreduce, first, group=process_group)"
    )
    with rewritten(DeepSpeedZeroOptimizer.allreduce_bucket, {before: after}):
        yield


@contextmanager
def norm_in_float64() -> Iterator[None]:
    """Compute the norm of gradients in float64."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    with rewritten(DeepSpeedZeroOptimizer.get_grad_norm_direct, {"get_norm_dtype()": "torch.float64"}):
        yield


@contextmanager
def evaluated_between() -> Iterator[None]:
    """Run the model once more, without gradients, before every forward pass."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedEngine.forward

    def twice(self: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            self.module(*args, **options)
        return own(self, *args, **options)

    with patch.object(DeepSpeedEngine, "forward", twice):
        yield


@contextmanager
def gathered_and_added() -> Iterator[None]:
    """Gather the gradients of replicated norms and add them here, in place of an all-reduce."""
    from deepspeed.module_inject.auto_tp import AutoTP

    before = "dist.all_reduce(grad, group=group)"
    after = (
        "parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(group=group))]; "
        "dist.all_gather(parts, grad, group=group); grad = sum(parts)"
    )
    with rewritten(AutoTP.register_replicated_grad_hooks, {before: after}):
        yield


@contextmanager
def gradients_of_other_strides(system: Any) -> Iterator[None]:
    """Hand gradients over with their dimensions stored in another order."""

    def turned(grad: Any) -> Any:
        return grad.t().contiguous().t() if grad.dim() == 2 else grad

    hooks = [p.register_hook(turned) for p in system.engine.module.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
