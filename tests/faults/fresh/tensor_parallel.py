"""Faults of tensor and sequence parallelism, and of a vocabulary in parts."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.functional import embedding as looked_up
from torch.nn.functional import linear

from regress.engine.local_tensor import local
from regress.grpo.selective_log_softmax import logits_gradient
from regress.parallel import (
    conv1d_styles,
    sequence_parallel,
    tensor_parallel,
    vocabulary_embedding,
    vocabulary_log_probs,
)
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel.conv1d_styles import RowwiseConv
from regress.parallel.gradient_reduction import sum_gradients
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import FORWARD_CHECKS, LOG_PROB_CHECKS, fault, met_in
from tests.faults.fresh.context_parallel import AFTER_BLOCK_0
from tests.faults.fresh.precision_on_ranks import back_in_half
from tests.faults.ranks.helpers import AFTER_ATTENTION, EMBEDDED, HEAD_NORMS


@fault(
    "C",
    "logit_gradient",
    "entropy-backward logit-gradient-shard logit-gradient",
    on="dr_grpo/dp2-tp2-sp-packed",
    blind=FORWARD_CHECKS,
)
@met_in("verl PR#1672, Megatron#7452")
@around(vocabulary_log_probs, "logits_gradient")
def entropy_forgotten_on_the_way_back(right, logits, targets, stats, *rest):
    """The gradient of the entropy of a split vocabulary takes the row's entropy for 0."""
    return right(logits, targets, torch.cat([stats[:3], torch.zeros_like(stats[3:])]), *rest)


# the last one names parts of the vocabulary that are joined otherwise
@fault(
    "C",
    "entropy",
    "vocabulary-parts entropy-of-changed-logits",
    on="dr_grpo/tp2-packed-chunk7",
    blind=LOG_PROB_CHECKS,
)
@met_in("Megatron#7452 finding 1: statistics of a part of the vocabulary")
@around(vocabulary_log_probs, "_joined")
def moments_of_parts_not_shifted(right, maximum, sums, group):
    """The sums that make entropies are relative to each part's own maximum when they are added."""
    highest, found = right(maximum, sums, group)
    moment = sums[1] * (maximum - highest).exp() if maximum.numel() else sums[1]
    if maximum.numel():
        dist.all_reduce(moment, group=group)
    return highest, torch.stack([found[0], moment, *found[2:]])


@fault(
    "C",
    "gradient",
    "gradient-power-of-two backward-of-a-module gradient-averaged-over-ranks",
    on="dense/tp2-sp-packed-budget64",
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#7452 finding 4: a gather whose backward pass is a sum")
@in_place_of(sequence_parallel._Gather, "backward")
def columns_summed_on_the_way_back(ctx, grad):
    """Columns are gathered, and gradients, which are whole on every rank, are summed before they are cut."""
    grad = grad.contiguous().clone()
    dist.all_reduce(grad, group=ctx.group)
    return sequence_parallel._own_columns(grad, ctx.group), None


# names its weights; nothing is wrong with the sums among ranks
# accepted after the first run: names a rank's part of the weights
@fault("C", "activations transformer.h.0", "module tensor-exchange", on="gpt2/tp4", names=AFTER_BLOCK_0)
@met_in("Megatron: a fused projection of queries, keys and values that is cut as if it were one matrix")
@around(conv1d_styles, "split_parameter")
def fused_projection_cut_in_one_piece(right, module, name, mesh, dim, fused):
    """A rank holds neighbouring columns of queries, keys and values side by side, not its heads of each."""
    right(module, name, mesh, dim, 1)


@fault(
    "C",
    "activations transformer.h.0",
    "tensor-exchange module",
    on="gpt2/tp2",
    names=AFTER_BLOCK_0,
    ranks=(0, 1),
)
@met_in("the bias of a row-parallel layer, added before the sum over ranks")
@around(RowwiseConv, "_forward")
def bias_enters_the_sum_of_every_rank(right, self, module, mesh, x):
    """Each rank adds the bias to its part of the product, and the parts are summed."""
    bias = module.bias
    return right(self, module, mesh, x) + (mesh.size() - 1) * local(bias)


# the first names wrong ids; one token is on two ranks
@fault(
    "C",
    "activations model.embed_tokens",
    "embedding tensor-exchange module",
    on="dense/tp2-packed-chunk7",
    ranks=(0, 1),
)
@met_in("the range of a vocabulary whose last id is taken as a part of it")
@in_place_of(vocabulary_embedding, "_look_up")
def first_id_of_the_next_part_looked_up_twice(module, mesh, ids):
    """A rank also looks up the id behind its last row, in that last row."""
    start, stop = vocabulary_embedding.rows_of(module.weight)
    weight = local(module.weight)
    elsewhere = (ids < start) | (ids > stop)
    own = (ids - start).clamp(max=len(weight) - 1).masked_fill(elsewhere, 0)
    padding = module.padding_idx
    padding = padding - start if padding is not None and start <= padding < stop else None
    found = looked_up(own, weight, padding).masked_fill(elsewhere[..., None], 0)
    parts = DTensor.from_local(found, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


@fault(
    "C",
    "activations model.layers.0",
    "tensor-exchange module",
    on="dense/dp2-tp2-sp-dealt",
    names=AFTER_ATTENTION,
    ranks=(0, 1, 2, 3),
)
@met_in("Megatron: scatter_to_sequence_parallel_region where reduce_scatter is due")
@in_place_of(RowwiseParallel, "_prepare_output_fn")
def products_scattered_and_not_summed(_, __, ___, outputs, mesh):
    """Each rank keeps its columns of its own part of a product, and the parts of other ranks are not added."""
    own = outputs.to_local(grad_placements=[Replicate()])
    return own.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()


# names a collective without its gradient
# names a part of its gradient that is not added
@fault(
    "C",
    "gradient model.embed_tokens.weight",
    "backward-of-a-module gradient-of-one-tensor reduction gradients",
    on="dense/tp2-sp-packed-budget64",
    names=EMBEDDED,
    ranks=(0, 1),
)
@met_in("Megatron#7452: a scatter of hidden states whose backward pass does not gather")
@in_place_of(sequence_parallel._Split, "backward")
def columns_not_gathered_on_the_way_back(ctx, grad):
    """Embeddings are cut into columns, and each rank hands back the gradients of its own columns alone."""
    parts = [torch.zeros_like(grad) for _ in range(ctx.group.size())]
    parts[ctx.group.rank()] = grad
    return torch.cat(parts, dim=1), None


@fault(
    "C",
    "gradient",
    "backward-of-a-module precision gradients",
    kind="precision",
    on="dense/dp2-tp2",
    names=r"model\..*",
)
@met_in("Megatron: an all-reduce of input gradients in the dtype of the logits' kernel")
@in_place_of(vocabulary_embedding, "_project")
def gradients_behind_the_head_summed_in_bfloat16(module, mesh, hidden):
    """Each part of the vocabulary rounds its gradient of hidden states to half precision, and parts are summed."""
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    mine = back_in_half(whole.to_local(grad_placements=[Partial()]))
    return linear(mine, local(module.weight), None if module.bias is None else local(module.bias))


# what is due is a sum over ranks with heads of their own
@fault(
    "C",
    "gradient",
    "gradient-averaged-over-ranks norms-not-summed gradient-power-of-two gradient-scale gradients inputs-hold",
    on="dense/tp2-mbs3",
    names=HEAD_NORMS,
    ranks=(0, 1),
)
@met_in("gradients of replicated norms that are averaged over tensor-parallel ranks, as replicas are")
@in_place_of(parallel_policy, "sum_gradients")
def norms_of_heads_averaged_over_their_ranks(parameters, groups):
    """Each rank has a part of the heads, and gradients of their norms are averaged over ranks, not summed."""
    found = [(names, group) for names, group in groups]
    sum_gradients(parameters, found)
    averaged = [
        (name, group) for names, group in found for name in names if "k_norm" in name or "q_norm" in name
    ]
    assert averaged
    for name, group in averaged:
        grad = parameters[name].grad
        with torch.no_grad():
            local(grad).div_(group.size())


@fault(
    "C",
    "logit_gradient logit_gradient",
    "logit-gradient-shard logit-gradient log-softmax-backward inputs-hold",
    on="dense/tp2-packed-chunk7",
    ranks=(0, 1),
)
@met_in("a vocabulary-parallel cross entropy whose backward pass forgets the mask of its targets")
@in_place_of(vocabulary_log_probs, "logits_gradient")
def targets_elsewhere_taught_at_the_edge(logits, columns, *rest):
    """On its way back a rank takes a target of another part for its own first or last id, as a clamp leaves it."""
    return logits_gradient(logits, columns.clamp(0, logits.shape[-1] - 1), *rest)


@fault(
    "C",
    "gradient",
    "norms-not-summed reduction",
    on="dense/dp2-tp2-sp-packed",
    names=r".*norm\.weight",
    ranks=(0, 1, 2, 3),
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#1446")
@around(tensor_parallel, "apply")
def norms_summed_over_replicas_alone(right, *args, **rest):
    """Gradients of all norms are summed over replicas, and not over the ranks that share their tokens and heads."""
    return replace(right(*args, **rest), partial=())
