"""Faults of the places of tokens: positions of completions, masks of padding, and rows that fill a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import policy
from regress.engine.attention import block_causal_mask
from regress.engine.batch import Microbatch, TokenBatch
from regress.layout import TokenLayout, ranks
from tests.faults.fault import fault
from tests.faults.fresh.attention import AFTER_BLOCK_0
from tests.faults.patch import Patch


@fault(
    category="G",
    fresh=True,
    source="verl PR#4243: position ids of the response that are made apart from those of the prompt",
    cases=("gpt2",),
    variants=("packed",),
    first="batch_inputs position_ids",
    rules=("position-ids",),  # names some tokens alone
)
def completions_count_positions_anew(patch: Patch) -> None:
    """Position ids begin again at 0 with the first token of a completion."""
    right: Any = TokenBatch._project

    def wrong(self: TokenBatch, *args: Any) -> Microbatch:
        found: Microbatch = right(self, *args)
        ids = found.position_ids.clone()
        for segment in found.layout.segments:
            begin = self.trajectories[segment.sample].prompt_length
            own = ids[segment.row, segment.col : segment.col + segment.stop - segment.start]
            own.copy_(torch.where(own >= begin, own - begin, own))
        return replace(found, position_ids=ids)

    patch.setattr(TokenBatch, "_project", wrong)


@fault(
    category="G",
    fresh=True,
    source="TRL PR#2708: a mask of left padding that is off by one",
    cases=("gpt2",),
    variants=("left-mbs3",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=(
        "padding-seen",
        "module",
        "padding-neighbours",
        "inputs-hold",
    ),  # the second one names a mask that is off by one
)
def first_token_behind_padding_hidden(patch: Patch) -> None:
    """In a row with padding on its left the first token is taken for padding: no other token sees it."""
    right: Any = block_causal_mask

    def wrong(layout: TokenLayout, *rest: Any) -> Tensor:
        mask: Tensor = right(layout, *rest).clone()
        for segment in layout.segments:
            if segment.col:
                mask[segment.row, 0, segment.col + 1 :, segment.col] = False
        return mask

    patch.setattr(policy, "block_causal_mask", wrong)


@fault(
    category="G",
    fresh=True,
    source="a sampler of batches that repeats the last one until all ranks have as many",
    cases=("gpt2",),
    variants=("dp2-packed-budget48",),
    first="coverage",
    rules=("batch-twice", "not-planned"),
)
def last_microbatch_of_a_rank_repeated(patch: Patch) -> None:
    """A rank that runs out of microbatches computes its last one again, where it should have an empty one."""

    def wrong(layouts: list[TokenLayout], count: int, empty: TokenLayout) -> list[TokenLayout]:
        last = layouts[-1] if layouts else empty
        return layouts + [last] * (count - len(layouts))

    patch.setattr(ranks, "_filled", wrong)
