"""Ulysses attention: ranks exchange columns for heads, and back (arXiv 2309.14509)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regress.parallel.context_columns import ContextSegments, attend, handed_on
from regress.parallel.differentiable_collectives import swap


def ulysses_attention(
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
    """Attend to all columns with a share of the heads.

    Args:
        query: ``[B, heads, T // ranks, head_dim]``.
        key: ``[B, key_value_heads, T // ranks, head_dim]``; repeated where ranks cannot share its heads.
        value: as ``key``.
        context: comes through the model's keyword arguments.

    Returns:
        ``[B, T // ranks, heads, head_dim]`` and no attention weights.

    Raises:
        ValueError: if there is no context, or the ranks cannot share the query heads.
    """
    context = handed_on(context, module, query, others)
    ranks, heads = context.ranks, query.shape[1]
    if heads % ranks:
        raise ValueError(f"{ranks} ranks cannot share {heads} attention heads; use ring or all_gather")
    repeats = ranks // math.gcd(ranks, key.shape[1])
    states = (query, *(tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value)))
    split = [
        tensor.unflatten(1, (ranks, -1)) for tensor in states
    ]  # [B, ranks, heads of a rank, T // ranks, d]
    sizes = [part.shape[2] for part in split]
    parts = swap(torch.cat(split, dim=2).transpose(0, 1), context.group)
    query, key, value = (
        parts.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, dim=1)
    )  # [B, heads of a rank, T, d]
    out = attend(query, key, value, context.gathered_mask, scaling)
    back = swap(out.unflatten(2, (ranks, -1)).permute(2, 0, 3, 1, 4), context.group)
    return back.permute(1, 2, 0, 3, 4).flatten(2, 3), None
