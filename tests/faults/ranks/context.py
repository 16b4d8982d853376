"""Faults of context parallelism."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine.attention import visible
from regress.engine.mini_batch import TokenBatch
from regress.parallel import differentiable_collectives, ring_attention
from regress.parallel.context_columns import ContextSegments
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION, of_others


def local_mask(patch, make):
    patch.setattr(ContextSegments, "local_mask", property(make))


@fault(
    "D",
    "activations",
    "positions-not-passed",
    on="gpt2/cp2",
    names=r"transformer\.(wpe|h\..|ln_f)|lm_head",
    ranks=(1,),
)
@met_in("LlamaFactory PR#7318")
@around(ParallelPolicy, "_run")
def positions_restart_on_every_rank(right, self, model, micro, hidden=None):
    """Position ids count the columns that lie here."""
    columns = torch.arange(micro.input_ids.shape[1]).expand_as(micro.input_ids)
    return right(self, model, replace(micro, position_ids=columns), hidden)


@fault("D", "activations", "context-exchange", on="dense/cp2-gather", names=AFTER_ATTENTION, ranks=(1,))
@met_in("transformers 5.23: masks made from the local hidden length")
@by(local_mask)
def mask_of_the_first_columns(self):
    """The causal mask counts the columns that lie here from 0."""
    return visible(self.whole, self.table[0], self.table.flatten())


@fault(
    "D",
    "activations",
    "context-exchange packed-leak",
    on="dense/cp2-ring-packed",
    names=AFTER_ATTENTION,
    ranks=(1,),
)
@met_in("NeMo-RL#2105, maxtext#4476")
@by(local_mask)
def leak_over_the_border(self):
    """Everything on earlier ranks is seen, of other samples too."""
    right = visible(self.whole, self.table[self.rank], self.table.flatten())
    return right | (self.table.flatten() < self.table[self.rank].min())


@fault(
    "D",
    "activations",
    "context-exchange",
    on="dense/cp2-zigzag-packed-mbs4",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
)
@met_in("ms-swift PR#10071")
def zigzag_read_in_order(patch):
    """Columns that were gathered rank after rank are taken for columns in order."""

    def gathered_mask(self):
        columns = torch.arange(self.table.numel())
        return visible(self.whole, columns, columns)

    patch.setattr(ContextSegments, "gathered_mask", property(gathered_mask))


@fault(
    "D",
    "activations",
    "context-exchange",
    on="dense/cp2-ring-packed",
    names=AFTER_ATTENTION,
    ranks=(1,),
    precisions="float64 float32",
)
@met_in("ROCm aiter PR#3334")
@in_place_of(ring_attention, "_kept")
def partial_softmax_not_rescaled(maximum, raised):
    """Blocks of keys are added relative to different maxima."""
    return torch.where(maximum.isinf(), torch.zeros_like(maximum), torch.ones_like(maximum))


@fault(
    "D",
    "gradient",
    "backward-of-a-module",
    on="dense/cp2-ring-packed",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(input_layernorm|self_attn\.[kv]).*",
    ranks=(0, 1),
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#1464")
@around(ring_attention._Ring, "backward")
def gradients_of_keys_stay_away(right, ctx, grad):
    """Gradients of keys and values end their round one rank from home."""
    query, pair, *rest = right(ctx, grad)
    return query, of_others(pair)[1 - dist.get_rank()], *rest


@fault("D", "activations", "context-exchange", on="gspo/cp4", names=AFTER_ATTENTION, ranks=(0, 1, 2, 3))
@met_in("DeepSpeed PR#8316")
@around(Tensor, "repeat_interleave")
def key_heads_tiled(right, self, repeats, dim=None, **rest):
    """Heads of keys are repeated in turn, 0 1 0 1, and not each by itself, 0 0 1 1."""
    if dim == 1 and self.dim() == 4:
        return self.repeat(1, repeats, 1, 1)
    return right(self, repeats, dim, **rest)


# targets: every wrong log-prob is proven to be that of another target
@fault("D", "log_probs", "labels-at-border targets", on="dense/cp2", ranks=(0,))
@met_in("verl PR#4250")
@around(TokenBatch, "_project")
def labels_rolled_after_the_split(right, self, *args):
    """The last column of a rank predicts the first one of the same rank."""
    micro = right(self, *args)
    targets = micro.target_ids.clone()
    targets[:, -1] = micro.input_ids[:, 0]
    return replace(micro, targets=targets.reshape(-1)[micro.local])


@fault("D", "ratio", "ratio-of-a-part", on="gspo/cp2", ranks=(0, 1))
@met_in("Megatron#7452 finding 9")
@in_place_of(ParallelPolicy, "sum_over_context_parallel")
def ratio_of_own_columns(self, values):
    """The ratio of a sequence is that of its tokens on this rank."""
    return values


@fault("D", "token_gradient", "ratio-gradient-of-a-part", on="gspo/cp2", ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("ms-swift PR#9947")
@around(ParallelPolicy, "sum_over_context_parallel")
def sum_across_without_gradient(right, self, values):
    """The ratio of a sequence is right, and its gradient that of a rank's own tokens."""
    return values + (right(self, values) - values).detach()


@fault("D", "activations", "context-exchange", on="dense/cp2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("pytorch#192920")
@around(differentiable_collectives, "_all_to_all")
def exchange_into_strided_memory(right, rows, sent, received, group):
    """gloo fills a transposed tensor as if it were contiguous."""
    out = torch.empty_like(rows)
    if out.is_contiguous():
        return right(rows, sent, received, group)
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
