"""Faults of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine.attention import visible
from regress.engine.batch import Microbatch, TokenBatch
from regress.parallel import (
    exchange,
    ring,
)
from regress.parallel.policy import ParallelPolicy
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    AFTER_ATTENTION,
    of_others,
)


def local_mask(patch: Patch, make: Callable[[ContextSegments], Tensor]) -> None:
    patch.setattr(ContextSegments, "local_mask", property(make))


@fault(
    category="D",
    source="LlamaFactory PR#7318",
    cases=("gpt2",),
    variants=("cp2",),
    first="activations",
    ranks=(1,),
    rules=("positions-not-passed",),
    names=r"transformer\.(wpe|h\..|ln_f)|lm_head",
)
def positions_restart_on_every_rank(patch: Patch) -> None:
    """Position ids count the columns that lie here."""
    right: Any = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        columns = torch.arange(micro.input_ids.shape[1]).expand_as(micro.input_ids)
        return right(self, model, replace(micro, position_ids=columns), hidden)

    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="D",
    source="transformers 5.23: masks made from the local hidden length",
    cases=("dense",),
    variants=("cp2-gather",),
    first="activations",
    ranks=(1,),
    rules=("context-exchange",),
    names=AFTER_ATTENTION,
)
def mask_of_the_first_columns(patch: Patch) -> None:
    """The causal mask counts the columns that lie here from 0."""
    local_mask(patch, lambda self: visible(self.whole, self.table[0], self.table.flatten()))


@fault(
    category="D",
    source="NeMo-RL#2105, maxtext#4476",
    cases=("dense",),
    variants=("cp2-ring-packed",),
    first="activations",
    ranks=(1,),
    rules=("context-exchange", "packed-leak"),
    names=AFTER_ATTENTION,
)
def leak_over_the_border(patch: Patch) -> None:
    """Everything on earlier ranks is seen, of other samples too."""

    def wrong(self: ContextSegments) -> Tensor:
        right = visible(self.whole, self.table[self.rank], self.table.flatten())
        return right | (self.table.flatten() < self.table[self.rank].min())

    local_mask(patch, wrong)


@fault(
    category="D",
    source="ms-swift PR#10071",
    cases=("dense",),
    variants=("cp2-zigzag-packed-mbs4",),
    first="activations",
    ranks=(0, 1),
    rules=("context-exchange",),
    names=AFTER_ATTENTION,
)
def zigzag_read_in_order(patch: Patch) -> None:
    """Columns that were gathered rank after rank are taken for columns in order."""
    columns = lambda self: torch.arange(self.table.numel())  # noqa: E731  # takes the place of a property
    patch.setattr(
        ContextSegments,
        "gathered_mask",
        property(lambda self: visible(self.whole, columns(self), columns(self))),
    )


@fault(
    precisions=("float64", "float32"),
    category="D",
    source="ROCm aiter PR#3334",
    cases=("dense",),
    variants=("cp2-ring-packed",),
    first="activations",
    ranks=(1,),
    rules=("context-exchange",),
    names=AFTER_ATTENTION,
)
def partial_softmax_not_rescaled(patch: Patch) -> None:
    """Blocks of keys are added relative to different maxima."""
    patch.setattr(
        ring,
        "_kept",
        lambda maximum, raised: torch.where(
            maximum.isinf(), torch.zeros_like(maximum), torch.ones_like(maximum)
        ),
    )


@fault(
    category="D",
    source="Megatron#1464",
    cases=("dense",),
    variants=("cp2-ring-packed",),
    first="gradient",
    ranks=(0, 1),
    rules=("backward-of-a-module",),
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(input_layernorm|self_attn\.[kv]).*",
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def gradients_of_keys_stay_away(patch: Patch) -> None:
    """Gradients of keys and values end their round one rank from home."""
    right: Any = ring._Ring.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        query, pair, *rest = right(ctx, grad)
        return query, of_others(pair)[1 - dist.get_rank()], *rest

    patch.setattr(ring._Ring, "backward", staticmethod(wrong))


@fault(
    category="D",
    source="DeepSpeed PR#8316",
    cases=("gspo",),
    variants=("cp4",),
    first="activations",
    ranks=(0, 1, 2, 3),
    rules=("context-exchange",),
    names=AFTER_ATTENTION,
)
def key_heads_tiled(patch: Patch) -> None:
    """Heads of keys are repeated in turn, 0 1 0 1, and not each by itself, 0 0 1 1."""
    right: Any = Tensor.repeat_interleave

    def wrong(self: Tensor, repeats: Any, dim: int | None = None, **rest: Any) -> Tensor:
        if dim == 1 and self.dim() == 4:
            return self.repeat(1, repeats, 1, 1)
        return right(self, repeats, dim, **rest)

    patch.setattr(Tensor, "repeat_interleave", wrong)


@fault(
    category="D",
    source="verl PR#4250",
    cases=("dense",),
    variants=("cp2",),
    first="log_probs",
    ranks=(0,),
    # targets: every wrong log-prob is proven to be that of another target
    rules=("labels-at-border", "targets"),
)
def labels_rolled_after_the_split(patch: Patch) -> None:
    """The last column of a rank predicts the first one of the same rank."""
    right: Any = TokenBatch._project

    def wrong(self: TokenBatch, *args: Any) -> Microbatch:
        micro: Microbatch = right(self, *args)
        targets = micro.target_ids.clone()
        targets[:, -1] = micro.input_ids[:, 0]
        return replace(micro, targets=targets.reshape(-1)[micro.local])

    patch.setattr(TokenBatch, "_project", wrong)


@fault(
    category="D",
    source="Megatron#7452 finding 9",
    cases=("gspo",),
    variants=("cp2",),
    first="ratio",
    ranks=(0, 1),
    rules=("ratio-of-a-part",),
)
def ratio_of_own_columns(patch: Patch) -> None:
    """The ratio of a sequence is that of its tokens on this rank."""
    patch.setattr(ParallelPolicy, "sum_over_context_parallel", lambda self, values: values)


@fault(
    category="D",
    source="ms-swift PR#9947",
    cases=("gspo",),
    variants=("cp2",),
    first="token_gradient",
    ranks=(0, 1),
    rules=("ratio-gradient-of-a-part",),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def sum_across_without_gradient(patch: Patch) -> None:
    """The ratio of a sequence is right, and its gradient that of a rank's own tokens."""
    right: Any = ParallelPolicy.sum_over_context_parallel

    def wrong(self: ParallelPolicy, values: Tensor) -> Tensor:
        return values + (right(self, values) - values).detach()

    patch.setattr(ParallelPolicy, "sum_over_context_parallel", wrong)


@fault(
    category="D",
    source="pytorch#192920",
    cases=("dense",),
    variants=("cp2",),
    first="activations",
    ranks=(0, 1),
    rules=("context-exchange",),
    names=AFTER_ATTENTION,
)
def exchange_into_strided_memory(patch: Patch) -> None:
    """gloo fills a transposed tensor as if it were contiguous."""
    right: Any = exchange._all_to_all

    def wrong(rows: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
        out = torch.empty_like(rows)
        if out.is_contiguous():
            return right(rows, sent, received, group)
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
        return out

    patch.setattr(exchange, "_all_to_all", wrong)


# @@new
