"""Log-probs and entropy of logits whose vocabulary is split over ranks, without gathering the logits.

Each rank reduces its part of a row to a maximum and two sums, in one pass (see `regress.grpo.selective_log_softmax`);
the parts are joined by an all-reduce of the maxima and one of the sums. The gradient of a part needs nothing from the
others. Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regress.grpo.argument_checks import InputError
from regress.grpo.selective_log_softmax import (
    BLOCK,
    VOCAB_CHUNK,
    Pieces,
    TokenLogProbs,
    check_logits,
    logits_gradient,
    online_softmax,
    row_blocks,
    scaled,
)


def vocab_parallel_log_probs(
    local_logits: Tensor,
    targets: Tensor,
    *,
    start: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    vocab_chunk: int = VOCAB_CHUNK,
    block: int = BLOCK,
    entropy: bool | Literal["no_grad"] = False,
) -> TokenLogProbs:
    """Compute `token_log_probs` of logits ``[..., V]``, of which this rank holds ``[..., start : start + V_local]``.

    The parts may be of unequal size, and empty. Every rank of the group has to call this with the same ``targets``
    (``[...]``, ids of the whole vocabulary); each gets the same result, bit for bit.

    Raises:
        InputError: shapes that do not match, a target that no rank holds, a size below 1, or a temperature of 0 or
            less.
    """
    check_logits(local_logits, targets, temperature, vocab_chunk, block)
    outputs: tuple[Tensor, Tensor | None]
    outputs = _VocabParallelLogProbs.apply(
        local_logits, targets - start, temperature, Pieces(vocab_chunk, block), entropy, group
    )
    return TokenLogProbs(*outputs)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        temperature: float,
        pieces: Pieces,
        entropy: bool | Literal["no_grad"],
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor | None]:
        flat = columns.reshape(-1)
        maximum, sums = _local_sums(logits, flat, temperature, pieces, bool(entropy))
        maximum, sums = _joined(maximum, sums, group)
        total, moment, target, holders = sums
        _check_holders(holders, flat)
        log_sum = total.log()
        stats = torch.stack([(target - maximum) - log_sum, maximum, log_sum, log_sum - moment / total])
        entropies = stats[3].view(columns.shape).clone() if entropy else None
        ctx.save_for_backward(logits, flat, stats)
        ctx.temperature, ctx.pieces, ctx.entropy_grad = temperature, pieces, entropy is True
        if entropies is not None and entropy == "no_grad":
            ctx.mark_non_differentiable(entropies)
        return stats[0].view(columns.shape).clone(), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, columns, stats = ctx.saved_tensors
        up_entropy = grad_entropy if ctx.entropy_grad else None
        grad = logits_gradient(
            logits, columns, stats, grad_log_probs, up_entropy, ctx.temperature, ctx.pieces
        )
        return grad, None, None, None, None, None


def _local_sums(
    logits: Tensor, columns: Tensor, temperature: float, pieces: Pieces, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return, per row of this part, the maximum m, and [4, rows]: sum exp(x - m), sum (x - m) exp(x - m),
    the target's logit or 0, and 1 if the target lies here.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    maximum = torch.full((columns.numel(),), torch.finfo(dtype).min, dtype=dtype, device=logits.device)
    sums = torch.zeros(4, columns.numel(), dtype=dtype, device=logits.device)
    for rows, block in row_blocks(logits, pieces):
        maximum[rows], sums[0, rows], sums[1, rows] = online_softmax(
            block, temperature, pieces.columns, dtype, entropy
        )
        column = columns[rows, None]
        here = ((column >= 0) & (column < block.shape[1])).squeeze(1)
        target = block.gather(1, column.clamp(0, block.shape[1] - 1)).squeeze(1)
        sums[2, rows] = scaled(target, temperature, dtype).masked_fill(~here, 0)
        sums[3, rows] = here.to(dtype)
    return maximum, sums


def _joined(maximum: Tensor, sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the maximum and the sums over the whole vocabulary."""
    if not maximum.numel():
        return maximum, sums
    highest = maximum.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = maximum - highest
    total, moment, target, holders = sums
    sums = torch.stack([total * shift.exp(), (moment + shift * total) * shift.exp(), target, holders])
    dist.all_reduce(sums, group=group)
    return highest, sums


def _check_holders(holders: Tensor, columns: Tensor) -> None:
    lost = torch.nonzero(holders != 1).flatten()
    if len(lost):
        row = int(lost[0])
        raise InputError(f"""the target of row {row} lies in {int(holders[row])} parts of the vocabulary (on this rank
        it would be column {int(columns[row])}): every token id lies in exactly one; pass each rank the first id of its
        own part as start, and fill positions without a target with any token id, such as 0.""")
