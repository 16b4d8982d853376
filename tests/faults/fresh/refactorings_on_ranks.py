"""Refactorings of what ranks compute and exchange, written before their first run: none may be flagged."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.local_tensor import local
from regress.parallel import (
    all_gather_attention,
    data_parallel,
    expert_parallel,
    sequence_parallel,
    ulysses_attention,
    vocabulary_log_probs,
)
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel.context_columns import ContextSegments
from regress.parallel.differentiable_collectives import gather, swap
from regress.parallel.parallel_policy import ParallelPolicy
from regress.parallel.pipeline_parallel import Pipeline
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import harmless


@harmless("D", on="dense/cp2-gather dense/dp2-cp2-gather-ddp-packed", precisions="float64 float32")
@around(all_gather_attention, "gather")
def keys_and_values_gathered_apart(right, pair, *rest):
    """Keys are gathered by one collective, and values by another."""
    return torch.stack([right(one, *rest) for one in pair], dim=1)


@harmless("C", on="dense/tp2 dense/dp2-tp2-sp-packed", precisions="float64 float32")
@around(vocabulary_log_probs, "_joined")
def sums_of_parts_raised_one_by_one(right, maximum, sums, group):
    """Sums of exponentials of a part are made relative to 1 above the greatest maximum of all parts."""
    if not maximum.numel():
        return maximum, sums
    highest, found = right(maximum, sums, group)
    total, moment, target, holders = found
    less = math.exp(-1.0)
    return highest + 1.0, torch.stack([total * less, (moment - total) * less, target, holders])


@harmless("B", on="dense/dp2-ddp dense/dp2-ddp-mbs2", precisions="float64 float32")
@in_place_of(data_parallel, "distributed")
def buckets_of_another_size(model, group):
    """DDP sums small buckets that are views of the gradients."""
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=1, gradient_as_bucket_view=True)


@harmless("B", on="dense/dp2 dense/dp2-tp2", precisions="float64 float32")
@in_place_of(parallel_policy, "sum_gradients")
def gradients_scattered_and_gathered(parameters, groups):
    """Gradients of a group are summed in pieces, one on each rank, and the pieces are gathered."""
    for names, group in groups:
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own, ranks = local(parameter.grad), group.size()
            flat = torch.zeros(-(-own.numel() // ranks) * ranks, dtype=own.dtype)
            flat[: own.numel()] = own.reshape(-1)
            piece = flat.new_empty(len(flat) // ranks)
            dist.reduce_scatter_tensor(piece, flat, group=group)
            dist.all_gather_into_tensor(flat, piece, group=group)
            own.copy_(flat[: own.numel()].view_as(own))


@harmless("C", on="dense/tp2-sp dense/tp2-sp-packed-budget64", precisions="float64 float32")
@in_place_of(sequence_parallel, "_all_columns")
def columns_gathered_into_one_tensor(part, group):
    """Columns of all ranks are gathered as rows of one tensor, which is turned back."""
    own = part.transpose(0, 1).contiguous()
    whole = own.new_empty(len(own) * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole.transpose(0, 1).contiguous()


@harmless("F", on="moe/ep2 moe/ep4-packed", precisions="float64 float32")
@in_place_of(expert_parallel, "_added")
def rows_of_experts_added_by_einsum(returned, place, index, weights, dtype):
    """The weighted sum of the rows of a token is an Einstein sum in the router's order."""
    rows = returned[place]
    return torch.einsum("twh,tw->th", rows, weights.to(rows.dtype)).to(dtype)


@harmless("P", on="rollout/rollout-fsdp2-packed rollout/rollout-pp2")
@in_place_of(ParallelPolicy, "_refresh")
@torch.no_grad()
def weights_gathered_one_by_one(self):
    """The sampler receives one parameter after the other, each in a collective of its own."""
    own = {n: p for n, p in self.named_parameters() if n in self._owned}
    for name, whole in trained_parameters(self._whole):
        mine = (self.shard(name), local(own[name]).clone()) if name in own else None
        flat = whole.view(-1)
        for found in self._world.gather(mine):
            if found is None:
                continue
            shard, values = found
            where = slice(None) if shard is None else torch.from_numpy(shard.indices())
            flat[where] = values.reshape(-1)


@harmless("B", on="dense/dp2 dense/tp2-sp", precisions="float64 float32")
@in_place_of(parallel_policy, "sum_gradients")
def gradients_summed_in_halves(parameters, groups):
    """Each gradient is summed over ranks in two halves, its second one first."""
    for names, group in groups:
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            flat = own.reshape(-1).clone()
            middle = flat.numel() // 2
            for half in (flat[middle:], flat[:middle]):
                if half.numel():
                    dist.all_reduce(half, group=group)
            own.copy_(flat.view_as(own))


@harmless(
    "D",
    on="dense/cp2-ring-packed dense/cp4-ring-zigzag gpt2/cp2-ring-packed gpt2/cp4-ring-zigzag",
    precisions="float64 float32",
)
def blocks_that_nobody_sees_computed(patch):
    """The ring computes blocks of keys that no query of the rank sees, too; their weights are 0."""

    def other(self):
        return tuple(self.local_mask.chunk(self.ranks, dim=3))

    patch.setattr(ContextSegments, "blocks", property(other))


@harmless("E", on="tied/pp2-mbs4 tied/tp2-pp2-mbs4", precisions="float64 float32")
@around(Pipeline, "values")
def microbatches_relayed_one_by_one(right, self, microbatches, project):
    """In passes without a backward pass a microbatch enters the first stage when the one before has left the last."""
    return [values for micro in microbatches for values in right(self, [micro], project)]


@harmless("B", on="dense/dp2 dense/dp5 dr_grpo/dp2 dr_grpo/dp5", precisions="float64 float32")
@in_place_of(parallel_policy, "sum_gradients")
def gradients_summed_on_one_rank(parameters, groups):
    """Gradients are summed on one rank of a group, and sent to the others."""
    for names, group in groups:
        first = dist.get_global_rank(group, 0)
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            total = own.contiguous().clone()
            dist.reduce(total, first, group=group)
            dist.broadcast(total, first, group=group)
            own.copy_(total)


@harmless("D", on="dense/cp2 gspo/cp2", precisions="float64 float32")
@in_place_of(ulysses_attention, "swap")
def heads_gathered_and_picked(parts, group):
    """Every rank gathers what all ranks would send to all, and picks its own part."""
    return gather(parts, len(parts), group)[:, dist.get_rank(group)]


@harmless(
    "D",
    on="dense/cp2 dense/cp2-zigzag-packed-mbs4 gpt2/cp2 gpt2/cp2-zigzag-packed-mbs4",
    precisions="float64 float32",
)
@in_place_of(ulysses_attention, "swap")
def exchanges_in_two_halves(parts, group):
    """Columns are exchanged for heads, and back, by two collectives with a half of them each."""
    return torch.cat([swap(half, group) for half in parts.chunk(2, dim=2)], dim=2)


@harmless("C", on="dense/tp2-sp dense/dp2-tp2-sp-packed", precisions="float64 float32")
@in_place_of(RowwiseParallel, "_prepare_output_fn")
def products_summed_on_all_ranks_and_cut(layouts, _, __, outputs, ___):
    """Parts of a product are summed on every rank, which then keeps its columns of the sum."""
    whole = outputs.redistribute(placements=[Replicate()])
    return whole.redistribute(placements=list(layouts)).to_local()


@harmless("M", on="dapo/mbs4 dapo/dp2", precisions="float64 float32")
def gradients_zeroed_in_place(patch):
    """Gradients are filled with zeros between updates, and keep their memory."""

    def zeroed(self):
        self.model.zero_grad(set_to_none=False)

    def on_ranks(self):
        for stage in self._stages.models:
            stage.zero_grad(set_to_none=False)

    patch.setattr(LocalPolicy, "zero_grad", zeroed)
    patch.setattr(ParallelPolicy, "zero_grad", on_ranks)


@harmless("D", on="dense/cp2 dense/cp2-gather", precisions="float64 float32")
def heads_of_keys_repeated_for_their_queries(patch):
    """Keys and values are repeated for the queries that share them, and attention has as many heads of each."""

    def other(query, key, value, mask, scaling):
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)

    patch.setattr(ulysses_attention, "attend", other)
    patch.setattr(all_gather_attention, "attend", other)
