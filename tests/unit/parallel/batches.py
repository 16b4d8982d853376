"""Microbatches of four kinds of rows, and the passes of a model over them in true float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.attention import VARLEN, VarlenSegments, block_causal_mask
from regress.engine.log_prob_projection import logits_at
from regress.engine.numeric_types import arithmetic
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import Segment, TokenLayout

LAYOUTS = (  # the columns are multiples of 4, for sequence parallelism
    TokenLayout((3, 12), (Segment(0, 0, 12, 0, 0), Segment(1, 0, 5, 1, 0), Segment(2, 0, 1, 2, 0))),
    TokenLayout((1, 16), (Segment(0, 0, 6, 0, 0), Segment(1, 0, 2, 0, 6), Segment(2, 0, 7, 0, 8))),
    TokenLayout((2, 8), (Segment(0, 0, 4, 0, 0), Segment(1, 0, 4, 0, 4), Segment(2, 0, 6, 1, 0))),
    TokenLayout((2, 8), (Segment(0, 0, 3, 0, 5), Segment(1, 0, 8, 1, 0))),
)
"""Right padded, packed in one row, packed in two rows, left padded."""


@dataclass(frozen=True)
class Micro:
    """A microbatch; ``at`` is the flat position whose logits predict each loss token."""

    layout: TokenLayout
    input_ids: Tensor
    at: Tensor
    targets: Tensor
    weights: Tensor

    def arguments(self, implementation: str) -> dict[str, Any]:
        """Return the model's arguments besides its inputs."""
        layout = self.layout
        offsets = np.cumsum([0, *(s.stop for s in layout.segments)])
        index = torch.from_numpy(layout.indices(offsets)[1])
        mask: Tensor = block_causal_mask(layout, implementation, torch.float64, torch.device("cpu"))
        if implementation == VARLEN:
            mask = torch.from_numpy(layout.attention_mask)
        return {
            "position_ids": torch.from_numpy(layout.position_ids),
            "attention_mask": mask,
            "use_cache": False,
            "varlen": VarlenSegments.of(layout, index),
        }


def microbatches(vocabulary: int) -> list[Micro]:
    return [_micro(layout, vocabulary, seed) for seed, layout in enumerate(LAYOUTS)]


def pad_id(vocabulary: int) -> int:
    return vocabulary // 2


def _micro(layout: TokenLayout, vocabulary: int, seed: int) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, layout.shape, generator=generator)
    ids[torch.from_numpy(layout.positions) == 0] = pad_id(vocabulary)  # its embedding gets no gradient
    local = torch.nonzero(torch.from_numpy(layout.positions).reshape(-1) > 0).squeeze(1)
    weights = torch.randn(2, len(local), generator=generator, dtype=torch.float64)
    return Micro(layout, ids, local - 1, ids.reshape(-1)[local], weights)


def logits_of(model: PreTrainedModel, micro: Micro, **inputs: Tensor) -> Tensor:
    """Logits ``[K, V]`` of the loss tokens, or the part of them that the model gives."""
    inputs = inputs or {"input_ids": micro.input_ids}
    with arithmetic(model.dtype), logits_at(model, micro.at):
        logits: Tensor = model(**inputs, **micro.arguments(model.config._attn_implementation)).logits
    return logits.squeeze(0)


def backward(out: TokenLogProbs, micro: Micro) -> None:
    """Back-propagate a loss that both log-probs and entropies enter."""
    assert out.entropy is not None
    share = (micro.weights[0] * out.log_probs).sum() + (micro.weights[1] * out.entropy).sum()
    with arithmetic(out.log_probs.dtype):
        share.backward()
