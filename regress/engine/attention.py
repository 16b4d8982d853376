"""Attention over any token layout: block-causal masks, and a kernel that skips padding.

Three implementations see the same layout: ``eager`` gets an additive mask, ``sdpa`` a boolean one, and
``varlen`` none at all: it cuts queries, keys and values into the layout's segments and runs plain causal
attention on each, so that neither padding nor pairs of tokens from different samples cost anything.
Layers with a sliding window get a mask of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from regress.errors import ConfigError
from regress.layout import TokenLayout

VARLEN = "varlen"
MASKED = ("eager", "sdpa")
"""Implementations that heed a mask alone."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers that the masks serve, as transformers calls them."""
_BEYOND = ("softcap", "s_aux", "position_bias")
"""Name the changes of scores beyond a mask that transformers asks of attention: soft caps, sinks, biases."""


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


def layer_kinds(config: PretrainedConfig) -> frozenset[str]:
    """Return the kinds of a model's layers, as transformers calls them."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return frozenset(kinds or [FULL if sliding_window(config) is None else SLIDING])


def sliding_window(config: PretrainedConfig) -> int | None:
    """Return how many tokens, itself included, a token of a sliding layer sees; None without such layers."""
    text = config.get_text_config()
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    return window if window is not None and (not kinds or SLIDING in kinds) else None


def masks_of_layers(mask: Tensor, config: PretrainedConfig) -> Tensor | dict[str, Tensor]:
    """Return the mask ``[B, 1, T, T]`` as the layers of a model need it: one for all, or one for each of their kinds.

    Tokens of a sample lie side by side, so that a window is one of columns.
    """
    window, columns = sliding_window(config), torch.arange(mask.shape[-1], device=mask.device)
    if window is None or window >= len(columns):
        return mask
    far = columns[:, None] - columns >= window
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    sliding = mask.masked_fill(far, hidden)
    return sliding if layer_kinds(config) == {SLIDING} else {FULL: mask, SLIDING: sliding}


def refuse_beyond(module: torch.nn.Module, name: str, given: Mapping[str, Any]) -> None:
    """Refuse to leave out what a model asks its attention for beside a mask.

    Args:
        name: of the setting that chose the attention.
        given: the other keyword arguments of the attention function.

    Raises:
        ConfigError: naming it.
    """
    for key in _BEYOND:
        if given.get(key) is not None:
            raise ConfigError(f"""{name} computes plain attention, and {type(module).__name__} asks for {key} besides;
            set model.attn_implementation=eager and parallel.cp=1""")


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
    **others: Any,
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
        ConfigError: if the model asks for more than plain attention.
    """
    refuse_beyond(module, "model.attn_implementation=varlen", others)
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
