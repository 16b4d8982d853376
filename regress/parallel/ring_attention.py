"""Ring attention: keys and values travel round the ranks while each rank's queries stay (arXiv 2310.01889).

Step ``s`` uses the keys of the rank ``s`` places before. The softmax is merged online: with the running
maximum ``m``, the sum ``l`` of ``exp(score - m)`` and the value sum ``a``, a block with maximum ``m'`` scales
both by ``exp(m - max(m, m'))`` before it adds its own. The backward pass goes round once more with the row's
log-sum-exp; the gradients of keys and values travel with them and return to their rank after the last step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regress.parallel.context_columns import ContextSegments, handed_on
from regress.parallel.differentiable_collectives import uncompiled


@uncompiled
def ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    context: ContextSegments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from the columns on this rank, with scores and sums in float32 or wider.

    Arguments, result and errors are those of ``ulysses_attention``, with any number of heads.
    """
    context = handed_on(context, module, query, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, key_value_heads, queries of one, T, d]
    out: Tensor = _Ring.apply(grouped, torch.stack((key, value)), scale, context)
    return out.flatten(1, 2).transpose(1, 2), None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, scale: float, context: ContextSegments) -> Tensor:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows = query.to(wide) * scale
        maximum = rows.new_full((*rows.shape[:-1], 1), -torch.inf)
        total, values = torch.zeros_like(maximum), torch.zeros_like(rows)
        travelling = pair.contiguous()
        for step in range(context.ranks):
            shift = _Shift(travelling, context) if step + 1 < context.ranks else None
            visible = context.blocks[(context.rank - step) % context.ranks]
            if visible is not None:
                key, value = travelling.to(wide).unsqueeze(3)
                scores = _scores(rows, key, visible)
                # the first block is the rank's own, where every token sees itself: the
                # maximum is finite from then on
                raised = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                weights, kept = torch.exp(scores - raised), _kept(maximum, raised)
                total = total * kept + weights.sum(-1, keepdim=True)
                values = values * kept + weights @ value
                maximum = raised
            if shift is not None:
                travelling = shift.arrived()
        out = (values / total).to(query.dtype)
        ctx.save_for_backward(query, pair, out, maximum + total.log())
        ctx.scale, ctx.context = scale, context
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, pair, out, log_sum = ctx.saved_tensors
        context: ContextSegments = ctx.context
        wide = log_sum.dtype
        rows, up = query.to(wide) * ctx.scale, grad.to(wide)
        common = (up * out.to(wide)).sum(-1, keepdim=True)
        grad_rows = torch.zeros_like(rows)
        # keys, values and their gradients, in one tensor: [4, B, key_value_heads, T // ranks, d]
        travelling = torch.cat((pair.to(wide), torch.zeros_like(pair, dtype=wide)))
        for step in range(context.ranks):
            visible = context.blocks[(context.rank - step) % context.ranks]
            if visible is not None:
                key, value = travelling[:2].unsqueeze(3)
                weights = torch.exp(_scores(rows, key, visible) - log_sum)
                grad_scores = weights * (up @ value.mT - common)
                grad_rows += grad_scores @ key
                travelling[2] += (grad_scores.mT @ rows).sum(2)
                travelling[3] += (weights.mT @ up).sum(2)
            if context.ranks > 1:
                travelling = _Shift(travelling, context).arrived()
        return (grad_rows * ctx.scale).to(query.dtype), travelling[2:].to(pair.dtype), None, None


def _kept(maximum: Tensor, raised: Tensor) -> Tensor:
    """Return the factor that makes sums taken relative to ``maximum`` relative to ``raised``."""
    return torch.exp(maximum - raised)


def _scores(rows: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """Return scores ``[B, key_value_heads, queries of one, T_q, T_k]``, minus infinity where the key is not
    visible.
    """
    return (rows @ key.mT).masked_fill(~visible.unsqueeze(1), -torch.inf)


class _Shift:
    """Tensor on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, tensor: Tensor, context: ContextSegments) -> None:
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        after, before = (context.rank + 1) % context.ranks, (context.rank - 1) % context.ranks
        send = dist.P2POp(dist.isend, self._sent, group=context.group, group_peer=after)
        receive = dist.P2POp(dist.irecv, self._received, group=context.group, group_peer=before)
        self._works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received
