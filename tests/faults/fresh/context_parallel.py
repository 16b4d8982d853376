"""Faults of context parallelism: masks, heads and rings of ranks that share sequences."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from regress.engine import training_passes
from regress.engine.reference_policy import Reference
from regress.grpo import token_losses
from regress.parallel import context_columns, differentiable_collectives, ring_attention, ulysses_attention
from regress.parallel.context_columns import ContextSegments
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION

AFTER_BLOCK_0 = r"transformer\.(h\.|ln_f).*|lm_head"


@fault(
    "D",
    "activations transformer.h.0",
    "context-exchange module",
    on="gpt2/cp4-ring-zigzag",
    names=AFTER_BLOCK_0,
)
@met_in("a ring of n - 1 hops that counts the rank's own block as one of them")
def ring_ends_one_hop_early(patch):
    """Keys of the rank that is met last are left out, on the way forward and back."""
    right = ContextSegments.blocks.func  # type: ignore[attr-defined]  # a cached property

    def wrong(self):
        last = (self.rank + 1) % self.ranks
        return tuple(None if at == last else block for at, block in enumerate(right(self)))

    patch.setattr(ContextSegments, "blocks", property(wrong))


@fault(
    "D", "gradient", "backward-of-a-module", on="dense/dp2-cp2-ring-ddp-noreshard-mbs3", blind=FORWARD_CHECKS
)
@met_in("Megatron#1464")
@around(ring_attention._Ring, "backward")
def gradient_of_queries_not_scaled(right, ctx, grad):
    """On the way back round the ring queries lack the scale of attention."""
    query, *rest = right(ctx, grad)
    return (query / ctx.scale, *rest)


@fault(
    "D", "gradient", "backward-of-a-module", on="dense/fsdp2-cp2-ring-hsdp-noreshard", blind=FORWARD_CHECKS
)
@met_in("Megatron#1464, ROCm aiter PR#3334")
def output_of_attention_left_out_on_the_way_back(patch):
    """The backward pass of the ring's softmax lacks the term that is common to a row."""
    right = ring_attention._Ring.backward

    class Changed:
        """The context of the forward pass, with an output of zeros."""

        def __init__(self, ctx):
            query, pair, out, log_sum = ctx.saved_tensors
            self.saved_tensors = query, pair, torch.zeros_like(out), log_sum
            self.scale, self.context = ctx.scale, ctx.context

    patch.setattr(ring_attention._Ring, "backward", staticmethod(lambda ctx, grad: right(Changed(ctx), grad)))


@fault("D", "activations transformer.h.0", "context-exchange", on="gpt2/cp4-ring-zigzag")
@met_in("ms-swift PR#10071, slime PR#73")
def masks_of_the_ring_the_other_way_round(patch):
    """Keys arrive from the rank before, and meet the mask of those from the rank behind."""
    right = ContextSegments.local_mask.func  # type: ignore[attr-defined]  # a cached property

    def blocks(self):
        found = right(self).chunk(self.ranks, dim=3)
        return tuple(found[(2 * self.rank - at) % self.ranks] for at in range(self.ranks))

    patch.setattr(ContextSegments, "blocks", property(blocks))


@fault(
    "D",
    "gradient",
    "gradient-averaged-over-ranks gradient-power-of-two",
    on="dense/dp2-cp2-ddp",
    ranks=(0, 1, 2, 3),
    blind=FORWARD_CHECKS,
)
@met_in("VeOmni PR#1115, DeepSpeed Ulysses#5248")
@in_place_of(ParallelPolicy, "backward_scale")
def scaled_for_replicas_alone(self):
    """The average over replicas and parts of sequences is undone by the number of replicas alone."""
    return float(self._world.mesh.dp)


@fault(
    "D",
    "activations model.layers.0",
    "context-exchange",
    on="dense/cp2-zigzag-packed-mbs4",
    names=AFTER_ATTENTION,
)
@met_in("VeOmni PR#419")
def heads_return_in_another_order(patch):
    """Columns are exchanged for heads, and heads come back in the reverse order of their ranks."""
    calls = [0]

    def wrong(right, parts, group):
        calls[0] += 1
        found = right(parts, group)
        return found if calls[0] % 2 else found.flip(0)

    patch.around(ulysses_attention, "swap", wrong)


@fault(
    "D",
    "gradient",
    "backward-of-a-module gradient-averaged-over-ranks",
    on="tied/cp3-gather-packed-budget96",
    names=r"model\.(embed_tokens|layers\.0|layers\.1\.(input_layernorm|self_attn\.[kv]_proj))\..*",
)
@met_in("a gather of keys whose backward pass averages")
@around(differentiable_collectives._Gather, "backward")
def gradients_of_gathered_keys_averaged(right, ctx, grad):
    """Gradients of keys and values that all ranks have gathered are divided by the number of ranks."""
    found, *_ = right(ctx, grad)
    return found / ctx.ranks, None, None


@fault(
    "D", "gradient", "backward-of-a-module gradients inputs-hold", on="dense/cp2-ring-packed", ranks=(0, 1)
)
@met_in("Megatron#1464: a kernel whose backward pass is not told that attention is causal")
def mask_forgotten_on_the_way_back(patch):
    """The backward pass of the ring computes the weights of attention without the mask of its forward pass."""
    right = ring_attention._Ring.backward
    back = [False]

    def unmasked(scores, rows, key, visible):
        return scores(rows, key, torch.ones_like(visible) if back[0] else visible)

    def wrong(ctx, grad):
        back[0] = True
        try:
            return right(ctx, grad)
        finally:
            back[0] = False

    patch.around(ring_attention, "_scores", unmasked)
    patch.setattr(ring_attention._Ring, "backward", staticmethod(wrong))


@fault("D", "ratio", "ratio-of-a-part ratio inputs-hold", on="gspo/cp2", ranks=(0, 1))
@met_in("Megatron#7452 findings 3 and 9: a count of tokens that is not summed over parts of sequences")
@around(token_losses, "importance_ratio")
def log_ratios_of_all_columns_over_the_length_of_some(right, *args):
    """The log-ratio of a sample is summed over all ranks, and divided by the number of its tokens on this one."""
    *given, complete = args

    def of_values(values):
        return complete(values) if values.is_floating_point() else values

    return right(*given, of_values)


@fault("D", "ref_log_probs", "reference inputs-hold", on="dense/cp2-gather")
@met_in("verl: a reference model that is left out of sequence parallelism")
def reference_attends_to_own_columns(patch):
    """Tokens of the reference see the keys that lie on their own rank, and no others."""
    right = ContextSegments.local_mask.func  # type: ignore[attr-defined]  # a cached property
    asked = [False]

    def wrong(self):
        mask = right(self)
        if not asked[0]:
            return mask
        parts = mask.chunk(self.ranks, dim=3)
        own = [part if at == self.rank else torch.zeros_like(part) for at, part in enumerate(parts)]
        return torch.cat(own, dim=3)

    def noted(log_probs, self, microbatches):
        asked[0] = True
        try:
            return log_probs(self, microbatches)
        finally:
            asked[0] = False

    patch.setattr(ContextSegments, "local_mask", property(wrong))
    patch.around(Reference, "log_probs", noted)


# names the order of zigzag parts, and the mask of local columns
# only the later of a rank's two parts is wrong: names a block of a kernel, and a mask
@fault(
    "D",
    "activations transformer.h.0",
    "packed-leak context-exchange long-context module inputs-hold",
    on="gpt2/cp4-ring-zigzag",
    names=AFTER_BLOCK_0,
)
@met_in("a ring kernel that skips blocks by a test made for contiguous shards")
def blocks_skipped_by_their_first_query(patch):
    """The ring skips keys that a rank's first column does not see, though its second zigzag part sees them."""

    def wrong(self):
        blocks = self.local_mask.chunk(self.ranks, dim=3)
        return tuple(block if bool(block[:, :, 0].any()) else None for block in blocks)

    patch.setattr(ContextSegments, "blocks", property(wrong))


@fault(
    "D",
    "gradient",
    "backward-of-a-module precision gradients inputs-hold",
    kind="precision",
    on="dense/cp2-ring-packed",
    ranks=(0, 1),
)
@met_in("a softmax statistic that is kept in the dtype of the output")
@around(ring_attention._Ring, "backward")
def normalizer_of_the_ring_kept_in_bfloat16(right, ctx, grad):
    """The log-sum-exp of each row is kept in half precision until the backward pass of the ring reads it."""
    *rest, log_sum = ctx.saved_tensors
    told = SimpleNamespace(saved_tensors=(*rest, rounded(log_sum)), scale=ctx.scale, context=ctx.context)
    return right(told, grad)


# names tokens that are left out, and the mask
@fault("D", "loss loss", "loss-sum", on="tools/cp2", names="loss", ranks=(0,))
@met_in("verl PR#4250: the last token of a chunk has no label there, and is masked")
@around(training_passes, "_sum")
def tokens_behind_the_border_left_out(right, micro, values):
    """Tokens that the last column of a rank's chunk predicts do not enter the sum of the loss."""
    width = micro.layout.shape[1]
    border = (micro.predictors % width) == width - 1
    return right(micro, values.masked_fill(border, 0.0))


@fault(
    "D",
    "gradient",
    "reduction not-reduced",
    on="dense/dp2-cp2-packed",
    ranks=(0, 1, 2, 3),
    blind=FORWARD_CHECKS,
)
@met_in("VeOmni PR#1115")
@around(ParallelPolicy, "_sums")
def sequence_ranks_left_out_of_the_sum(right, self):
    """Gradients are summed over replicas alone, and each has two ranks with parts of its sequences."""
    group = self._world.group("dp")
    return [(names, group) for names, _ in right(self)]


@fault(
    "D",
    "activations model.layers.0",
    "positions-not-passed context-exchange rotary",
    on="dense/fsdp2-cp2-zigzag",
    names=AFTER_ATTENTION,
)
@met_in("ms-swift PR#10071, LlamaFactory PR#7318")
@around(ParallelPolicy, "_run")
def positions_of_a_contiguous_split(right, self, model, micro, hidden=None):
    """Columns are dealt out in zigzag, and positions as if they were contiguous."""
    width = micro.input_ids.shape[1]
    here = self._world.mesh.coordinates(self._world.rank)["cp"]
    columns = (torch.arange(width) + here * width).expand_as(micro.input_ids)
    return right(self, model, replace(micro, position_ids=columns), hidden)


@fault(
    "D",
    "activations model.layers.0",
    "context-exchange packed-leak",
    on="tools/cp2-packed",
    names=AFTER_ATTENTION,
)
@met_in("Megatron PR#6205")
@around(context_columns, "visible")
def boundaries_one_column_late(right, layout, queries, keys):
    """The borders of packed samples are taken from another table, one column late."""
    return right(layout, (queries - 1).clamp(min=0), (keys - 1).clamp(min=0))
