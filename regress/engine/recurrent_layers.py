"""Layers that carry a state along a row (linear attention and its convolution): each sample is a row of its own.

Attention keeps the samples of a packed row apart by a mask, and a state has none. transformers 5.23 resets it at
``cu_seq_lens``, which its kernels for GPUs alone take, and hands it on otherwise. Here such a layer sees samples as
right padded rows, whatever layout the other layers see, and its outputs go back to where the tokens lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence
from transformers import PreTrainedModel

from regress.engine.attention import VarlenSegments

KIND = "linear_attention"
"""Kind of layer that is known here, as ``layer_types`` of a configuration has it."""
_MIXER = "linear_attn"


def recurrent_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of a model that carry a state from token to token; none for attention alone."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == _MIXER]


def keep_samples_apart(model: PreTrainedModel) -> None:
    """Make every recurrent layer begin each sample anew, in passes that are told the segments (``varlen``).

    Passes without them, such as those of a sampler with its cache, are left as they are.
    """
    for module in recurrent_layers(model):
        kind = type(module)  # under its own name
        module.__class__ = type(kind.__name__, (SampleBySample, kind), {})


class SampleBySample(nn.Module):
    """Recurrent layer over the samples of its input, one by one."""

    def forward(self, hidden_states: Tensor, *, varlen: VarlenSegments | None = None, **rest: Any) -> Tensor:
        if varlen is None or not varlen.lengths:
            plain: Tensor = super().forward(hidden_states=hidden_states, **rest)
            return plain
        found: Tensor = super().forward(
            hidden_states=rows(hidden_states, varlen), **rest | {"attention_mask": None}
        )
        return together(found, varlen, hidden_states.shape)


def rows(hidden: Tensor, varlen: VarlenSegments) -> Tensor:
    """Return the tokens of ``[B, T, H]`` as one right padded row for each segment, ``[N, S, H]``."""
    flat = hidden.flatten(0, 1)
    if varlen.index is not None:
        flat = flat.index_select(0, varlen.index)
    return pad_sequence(flat.split(list(varlen.lengths)), batch_first=True)


def together(found: Tensor, varlen: VarlenSegments, shape: torch.Size) -> Tensor:
    """Return ``[N, S, H]`` in the shape ``[B, T, H]`` that `rows` took it from; 0 on padding."""
    flat = torch.cat(unpad_sequence(found, torch.tensor(varlen.lengths), batch_first=True))
    if varlen.index is not None:
        flat = flat.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, varlen.index, flat)
    return flat.reshape(shape)
