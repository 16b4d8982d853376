"""Fully sharded data parallelism (FSDP2), also replicated over groups of ranks (HSDP); gradients are summed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from regress.errors import ConfigError
from regress.parallel import parameter_shards


def apply(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard a model in place: block by block, then everything outside the blocks.

    Gradients are sums over the ranks, not means: the loss of a rank is its share of the whole. Parameters may be
    DTensors of a tensor-parallel mesh.

    Args:
        model: on one device; every rank holds the same weights before.
        mesh: ``fsdp``, or ``dp, fsdp``: sharded over the last dimension, replicated over the first. With a
            tensor-parallel mesh both have to be slices of one mesh.
        reshard_after_forward: drop the other ranks' part of a block between its forward and its backward.
        param_dtype: dtype that blocks compute in; ``None`` for the parameters' own.
        reduce_dtype: dtype that gradients are summed in; ``None`` for that of the gradients.

    Raises:
        ConfigError: if blocks compute in another dtype, and tensor parallelism left nothing of a weight here.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    empty = _empty(
        model, param_dtype
    )  # before blocks are sharded, which may leave nothing of a weight on a rank
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # the rest stays whole until its backward, as in torch: it comes next, and chunks of logits need the projection
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=empty)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot multiply before it sums; without a factor of its own FSDP divides by the number of ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _empty(model: PreTrainedModel, param_dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Return the parameters of which tensor parallelism left nothing on any rank they would be sharded over.

    FSDP cannot reduce their gradients (torch 2.13: "_chunk_cat expects non-empty tensor").
    """
    found = {parameter for parameter in model.parameters() if not parameter_shards.local(parameter).numel()}
    if found and param_dtype is not None:
        raise ConfigError(f"""parallel.fsdp_param_dtype={str(param_dtype).removeprefix("torch.")}: this rank holds no
        row of a weight of {model.config.vocab_size} rows, which FSDP can then not cast; set it to null, or lower
        parallel.tp""")
    return found


def reshard(model: nn.Module) -> None:
    """Drop the other ranks' parts of all parameters; call it after forward passes without a backward.

    Such passes leave parameters whole, and the next forward pass uses these, even after an optimizer or
    `load_state_dict` has changed this rank's part.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks that have parameters, in order; a pipeline stage has those of its own."""
    lists = [module for module in model.base_model.children() if isinstance(module, nn.ModuleList)]
    return [block for found in lists for block in found if next(block.parameters(), None) is not None]
