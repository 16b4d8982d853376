"""Plants in megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from plants.rewriting import rewritten


@contextmanager
def tokens_of_this_rank_only(system: Any) -> Iterator[None]:
    """Divide the sum of gradients by the tokens of this rank, in place of those of all ranks."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    before = "torch.distributed.all_reduce(num_tokens, group=dp_cp_group)"
    with rewritten(finalize_model_grads, {before: "pass"}):
        yield


@contextmanager
def gradients_not_reduced(system: Any) -> Iterator[None]:
    """Leave every data rank its own gradients."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    with patch.object(_ParamAndGradBucketGroup, "start_grad_sync", lambda self, force_all_reduce=False: None):
        yield


@contextmanager
def norms_not_reduced(system: Any) -> Iterator[None]:
    """Do not add the gradients of norms, which tensor ranks have from their own parts of the sequence or heads."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    with rewritten(_allreduce_non_tensor_model_parallel_grads, {"if grads:": "if False:"}):
        yield


@contextmanager
def tied_weights_not_reduced(system: Any) -> Iterator[None]:
    """Do not add the gradients that the first and the last stage have of the same embedding."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_embedding_grad

    before = "torch.distributed.all_reduce(grad, group=embd_group)"
    with rewritten(_allreduce_embedding_grad, {before: "pass"}):
        yield


@contextmanager
def replicas_counted_in_the_norm(system: Any) -> Iterator[None]:
    """Count parameters that all tensor ranks hold once for each of them."""
    from megatron.core import tensor_parallel

    with patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda *args: True):
        yield


@contextmanager
def parameters_not_gathered(system: Any) -> Iterator[None]:
    """Leave on every rank the old values of the parameters that other ranks updated."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    with patch.object(_ParamAndGradBucketGroup, "start_param_sync", lambda self, force_sync=False: None):
        yield


@contextmanager
def reduced_and_broadcast(system: Any) -> Iterator[None]:
    """Reduce gradients to one rank and send them from there."""
    from torch import distributed

    own = distributed.all_reduce

    def other(
        tensor: Any, op: Any = distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or not tensor.is_floating_point():
            return own(tensor, op=op, group=group, async_op=async_op)
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        distributed.reduce(tensor, ranks[-1], op=op, group=group)
        return distributed.broadcast(tensor, ranks[-1], group=group)

    with patch.object(distributed, "all_reduce", other):
        yield


@contextmanager
def norm_in_float64(system: Any) -> Iterator[None]:
    """Compute the norm of gradients in float64."""
    from megatron.core.optimizer import optimizer

    def precise(grads: Any, grad_stats_parallel_group: Any = None, **options: Any) -> float:
        import torch

        square = torch.zeros(1, dtype=torch.float64) + sum(grad.double().square().sum() for grad in grads)
        torch.distributed.all_reduce(square, group=grad_stats_parallel_group)
        return float(square.sqrt())

    with patch.object(optimizer, "get_grad_norm_fp32", precise):
        yield


@contextmanager
def likelihood_in_float64(system: Any) -> Iterator[None]:
    """Compute the likelihood of labels in float64."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    change = {"vocab_parallel_logits.float()": "vocab_parallel_logits.double()"}
    with rewritten(VocabParallelCrossEntropy.calculate_logits_max, change):
        yield


@contextmanager
def norms_reduced_one_by_one(system: Any) -> Iterator[None]:
    """Reduce the gradients of norms one by one, in place of all at once."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    changes = {
        "coalesced = _flatten_dense_tensors(grads)": (
            "coalesced = _flatten_dense_tensors([torch.distributed.all_reduce(grad, op=all_reduce_op, group=tp_group)"
            " or grad for grad in grads])"
        ),
        "torch.distributed.all_reduce(coalesced, op=all_reduce_op, group=tp_group)": "pass",
    }
    with rewritten(_allreduce_non_tensor_model_parallel_grads, changes):
        yield


@contextmanager
def parameters_gathered_twice(system: Any) -> Iterator[None]:
    """Gather updated parameters twice."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    own = _ParamAndGradBucketGroup.start_param_sync

    def twice(self: Any, force_sync: bool = False) -> None:
        own(self, force_sync)
        own(self, force_sync)

    with patch.object(_ParamAndGradBucketGroup, "start_param_sync", twice):
        yield
