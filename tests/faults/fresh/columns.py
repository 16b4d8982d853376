"""Semantic faults that show where strategies meet: parts of sequences, of the vocabulary and of the loss on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine import projection
from regress.grpo.logprobs import TokenLogProbs, logits_gradient
from regress.parallel import ring, sequence, ulysses, vocabulary
from regress.parallel.exchange import swap
from regress.parallel.pipeline import Pipeline
from regress.parallel.policy import ParallelPolicy
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION

BLIND = ("allclose", "mean 1e-3")
BACKWARD = ("loss 5 %", "loss 1 %", *BLIND)


@fault(
    category="H",
    fresh=True,
    source="Liger-Kernel: chunks that are joined in another order",
    variants=("tp2-packed-chunk7",),
    first="log_probs",
    rules=("order-not-restored", "log-probs-shifted"),
)
def chunks_joined_from_the_last(patch: Patch) -> None:
    """Log-probs of chunks are joined from the last chunk to the first."""
    right: Any = projection._in_chunks

    def wrong(model: Any, hidden: Tensor, targets: Tensor, compute: Any, chunk: int) -> Any:
        found = right(model, hidden, targets, compute, chunk)

        def turned(values: Tensor) -> Tensor:
            return torch.cat([*reversed(values.split(chunk))])

        entropy = None if found.entropy is None else turned(found.entropy)
        return TokenLogProbs(turned(found.log_probs), entropy)

    patch.setattr(projection, "_in_chunks", wrong)


@fault(
    category="D",
    fresh=True,
    source="Megatron#1464",
    variants=("dp2-cp2-ring-ddp-noreshard-mbs3",),
    first="gradient",
    rules=("backward-of-a-module",),
    blind=BACKWARD,
)
def gradient_of_queries_not_scaled(patch: Patch) -> None:
    """On the way back round the ring queries lack the scale of attention."""
    right: Any = ring._Ring.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        query, *rest = right(ctx, grad)
        return (query / ctx.scale, *rest)

    patch.setattr(ring._Ring, "backward", staticmethod(wrong))


@fault(
    category="D",
    fresh=True,
    source="Megatron#1464, ROCm aiter PR#3334",
    variants=("fsdp2-cp2-ring-hsdp-noreshard",),
    first="gradient",
    rules=("backward-of-a-module",),
    blind=BACKWARD,
)
def output_of_attention_left_out_on_the_way_back(patch: Patch) -> None:
    """The backward pass of the ring's softmax lacks the term that is common to a row."""
    right: Any = ring._Ring.backward

    class Changed:
        """The context of the forward pass, with an output of zeros."""

        def __init__(self, ctx: Any) -> None:
            query, pair, out, log_sum = ctx.saved_tensors
            self.saved_tensors = query, pair, torch.zeros_like(out), log_sum
            self.scale, self.context = ctx.scale, ctx.context

    patch.setattr(ring._Ring, "backward", staticmethod(lambda ctx, grad: right(Changed(ctx), grad)))


@fault(
    category="C",
    fresh=True,
    source="verl PR#1672, Megatron#7452",
    cases=("dr_grpo",),
    variants=("dp2-tp2-sp-packed",),
    first="logit_gradient",
    rules=("entropy-backward", "logit-gradient-shard", "logit-gradient"),
    blind=BACKWARD,
)
def entropy_forgotten_on_the_way_back(patch: Patch) -> None:
    """The gradient of the entropy of a split vocabulary takes the row's entropy for 0."""
    right: Any = logits_gradient

    def wrong(logits: Tensor, targets: Tensor, stats: Tensor, *rest: Any) -> Tensor:
        return right(logits, targets, torch.cat([stats[:3], torch.zeros_like(stats[3:])]), *rest)

    patch.setattr(vocabulary, "logits_gradient", wrong)


@fault(
    category="D",
    fresh=True,
    source="ms-swift PR#10071, slime PR#73",
    cases=("gpt2",),
    variants=("cp4-ring-zigzag",),
    first="activations transformer.h.0",
    rules=("context-exchange",),
)
def masks_of_the_ring_the_other_way_round(patch: Patch) -> None:
    """Keys arrive from the rank before, and meet the mask of those from the rank behind."""
    right: Any = ContextSegments.local_mask.func  # type: ignore[attr-defined]  # a cached property

    def blocks(self: ContextSegments) -> tuple[Tensor, ...]:
        found = right(self).chunk(self.ranks, dim=3)
        return tuple(found[(2 * self.rank - at) % self.ranks] for at in range(self.ranks))

    patch.setattr(ContextSegments, "blocks", property(blocks))


@fault(
    category="A",
    fresh=True,
    source="torchtitan#2972",
    cases=("tied",),
    variants=("dp2-pp2-mbs2",),
    first="token_gradient",
    rules=("token-gradient-of-ranks", "token-gradient-power-of-two", "token-gradient-scale"),
    blind=BACKWARD,
)
def loss_divided_by_stages(patch: Patch) -> None:
    """The loss enters the backward pass divided by the number of stages, and is reported without that."""
    right: Any = Pipeline.forward_backward

    def wrong(self: Pipeline, micros: Any, loss: Any, *rest: Any) -> Any:
        def divided(micro: Any, out: Any) -> Any:
            value, result = loss(micro, out)
            return value / self.group.size(), result

        return right(self, micros, divided, *rest)

    patch.setattr(Pipeline, "forward_backward", wrong)


@fault(
    category="D",
    fresh=True,
    source="VeOmni PR#1115, DeepSpeed Ulysses#5248",
    variants=("dp2-cp2-ddp",),
    first="gradient",
    ranks=(0, 1, 2, 3),
    rules=("gradient-averaged-over-ranks", "gradient-power-of-two"),
    blind=BACKWARD,
)
def scaled_for_replicas_alone(patch: Patch) -> None:
    """The average over replicas and parts of sequences is undone by the number of replicas alone."""
    patch.setattr(ParallelPolicy, "backward_scale", property(lambda self: float(self._world.mesh.dp)))


@fault(
    category="C",
    fresh=True,
    source="Megatron#7452 finding 1: statistics of a part of the vocabulary",
    cases=("dr_grpo",),
    variants=("tp2-packed-chunk7",),
    first="entropy",
    rules=(
        "vocabulary-parts",
        "entropy-of-changed-logits",
    ),  # the last one names parts of the vocabulary that are joined otherwise
    blind=BLIND,
)
def moments_of_parts_not_shifted(patch: Patch) -> None:
    """The sums that make entropies are relative to each part's own maximum when they are added."""
    right: Any = vocabulary._joined

    def wrong(maximum: Tensor, sums: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        highest, found = right(maximum, sums, group)
        moment = sums[1] * (maximum - highest).exp() if maximum.numel() else sums[1]
        if maximum.numel():
            dist.all_reduce(moment, group=group)
        return highest, torch.stack([found[0], moment, *found[2:]])

    patch.setattr(vocabulary, "_joined", wrong)


@fault(
    category="C",
    fresh=True,
    source="Megatron#7452 finding 4: a gather whose backward pass is a sum",
    variants=("tp2-sp-packed-budget64",),
    first="gradient",
    rules=("gradient-power-of-two", "backward-of-a-module", "gradient-averaged-over-ranks"),
    blind=BACKWARD,
)
def columns_summed_on_the_way_back(patch: Patch) -> None:
    """Columns are gathered, and gradients, which are whole on every rank, are summed before they are cut."""

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return sequence._own_columns(grad, ctx.group), None

    patch.setattr(sequence._Gather, "backward", staticmethod(wrong))


@fault(
    category="D",
    fresh=True,
    source="VeOmni PR#419",
    variants=("cp2-zigzag-packed-mbs4",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("context-exchange",),
)
def heads_return_in_another_order(patch: Patch) -> None:
    """Columns are exchanged for heads, and heads come back in the reverse order of their ranks."""
    right: Any = swap
    calls = [0]

    def wrong(parts: Tensor, group: Any) -> Tensor:
        calls[0] += 1
        found: Tensor = right(parts, group)
        return found if calls[0] % 2 else found.flip(0)

    patch.setattr(ulysses, "swap", wrong)
