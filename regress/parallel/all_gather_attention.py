"""All-gather attention: every rank attends from its own columns to the keys and values of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regress.parallel.context_columns import ContextSegments, attend, handed_on
from regress.parallel.differentiable_collectives import gather


def all_gather_attention(
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
    """Attend from the columns on this rank; arguments, result and errors as in ``ulysses_attention``, with
    any number of heads.
    """
    context = handed_on(context, module, query, others)
    parts = gather(torch.stack((key, value)), context.ranks, context.group)
    gathered = parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # [2, B, key_value_heads, T, d]
    out = attend(query, gathered[0], gathered[1], context.local_mask, scaling)
    return out.transpose(1, 2), None
