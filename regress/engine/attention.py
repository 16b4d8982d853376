"""Attention over any token layout: block-causal masks, and a kernel that skips padding.

Three implementations see the same layout: ``eager`` gets an additive mask, ``sdpa`` a boolean one, and
``varlen`` none at all: it cuts queries, keys and values into the layout's segments and runs plain causal
attention on each, so that neither padding nor pairs of tokens from different samples cost anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from regress.layout import TokenLayout

VARLEN = "varlen"


@dataclass(frozen=True)
class VarlenSegments:
    """Flat local indices of all tokens of a layout in segment order, and the length of each segment.

    ``index`` is ``None`` when the tokens already fill the local tensor in that order.
    """

    index: Tensor | None
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, layout: TokenLayout, local_index: Tensor) -> VarlenSegments:
        """Build the segments from a layout and its flat local token index ``[num_tokens]`` (ordered by segment)."""
        rows, columns = layout.shape
        lengths = tuple(segment.stop - segment.start for segment in layout.segments)
        full = len(local_index) == rows * columns and bool((local_index.diff() == 1).all())
        return cls(None if full else local_index, lengths)


def block_causal_mask(
    layout: TokenLayout, implementation: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a ``[B, 1, T, T]`` mask: a token sees itself and the earlier tokens of its own sample.

    Padding sees only itself, so that no row of the softmax is empty. Boolean for ``sdpa``; additive, of the
    model's dtype, for ``eager`` (which silently adds any mask, a boolean one too).
    """
    columns = torch.arange(layout.shape[1], device=device)
    allowed = visible(layout, columns, columns)
    if implementation != "eager":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )


def visible(layout: TokenLayout, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``[B, 1, Q, K]``: True if the token in column ``queries[i]`` sees the one in column
    ``keys[j]`` of its row.
    """
    samples = torch.from_numpy(layout.sample_ids).to(queries.device)
    own = samples[:, queries, None]
    same = (own == samples[:, None, keys]) & (own >= 0)
    causal, itself = queries[:, None] >= keys, queries[:, None] == keys
    return ((same & causal) | itself)[:, None]


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    varlen: VarlenSegments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention segment by segment; the signature is that of Hugging Face's attention functions.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, key_value_heads, T, head_dim]``.
        value: ``[B, key_value_heads, T, head_dim]``.
        varlen: the segments; comes through the model's keyword arguments.

    Returns:
        ``[B, T, heads, head_dim]``, zero on padding, and no attention weights.

    Raises:
        ValueError: if the model did not pass on ``varlen``.
    """
    if varlen is None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention; use sdpa"
        )
    batch, heads, columns, width = query.shape
    gqa = key.shape[1] != heads
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        for q, k, v in zip(*(_segments(tensor, varlen) for tensor in (query, key, value)), strict=True)
    ]
    if not parts:  # a microbatch without tokens still reaches every parameter
        return (query * 0 + (key.sum() + value.sum()) * 0).transpose(1, 2), None
    packed = torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)
    if varlen.index is not None:
        packed = packed.new_zeros(batch * columns, heads, width).index_copy(0, varlen.index, packed)
    return packed.reshape(batch, columns, heads, width), None


def _segments(tensor: Tensor, varlen: VarlenSegments) -> tuple[Tensor, ...]:
    """Split ``[B, heads, T, d]`` into one ``[1, heads, length, d]`` per segment."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    if varlen.index is not None:
        flat = flat.index_select(0, varlen.index)
    parts: tuple[Tensor, ...] = flat.transpose(0, 1).unsqueeze(0).split(list(varlen.lengths), dim=2)
    return parts


AttentionInterface.register(VARLEN, varlen_attention)
