"""Faults of conversations of several turns: which of their tokens are trained on, and their ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from regress.dump.trajectory import Trajectory
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.trainer import Trainer
from tests.faults.fault import fault
from tests.faults.fresh.padding import PADDING
from tests.faults.patch import Patch

END = 1
"""Id of the token that ends a turn in the golden cases."""
MASK = "batch_inputs response_mask"


def _masked(patch: Patch, change: Callable[[Trajectory, list[int]], list[int]]) -> None:
    """Change the loss mask of each sample."""
    right: Any = Trainer.loss_masks

    def wrong(self: Trainer, samples: Sequence[Trajectory]) -> list[list[int]]:
        masks = right(self, samples)
        return [change(one, [*mask]) for one, mask in zip(samples, masks, strict=True)]

    patch.setattr(Trainer, "loss_masks", wrong)


@fault(
    category="Q",
    fresh=True,
    source="NeMo-RL PR#2176: offsets of turns that count the token which opens them",
    cases=("tools",),
    variants=("packed",),
    first=MASK,
    rules=("mask-shifted", "tool-tokens", "loss-mask"),
)
def later_turns_trained_from_one_token_early(patch: Patch) -> None:
    """The mask of every turn but the first begins one token early, with the last one that its model did not write."""

    def change(sample: Trajectory, mask: list[int]) -> list[int]:
        for place in range(sample.prompt_length, len(mask) - 1):
            if mask[place + 1] and not mask[place]:
                mask[place] = 1
        return mask

    _masked(patch, change)


@fault(
    category="Q",
    fresh=True,
    source="TRL: a mask of completions that ends at their first end token",
    cases=("tools",),
    variants=("packed-dynamic",),
    first=MASK,
    rules=("loss-mask",),  # names tokens that are left out
)
def tokens_behind_the_first_end_token_masked(patch: Patch) -> None:
    """A completion ends with its first end token, although a second turn follows."""

    def change(sample: Trajectory, mask: list[int]) -> list[int]:
        begin = sample.prompt_length
        ends = [place for place in range(begin, len(mask)) if sample.tokens[place] == END]
        stop = ends[0] + 1 if ends else len(mask)
        return mask[:stop] + [0] * (len(mask) - stop)

    _masked(patch, change)


@fault(
    category="Q",
    fresh=True,
    source="a collator of a tokenizer without a token for padding: input_ids[input_ids == pad] = eos",
    cases=("tools",),
    variants=("left-mbs3",),
    first="batch_inputs input_ids",
    rules=("other-tokens",),  # names tokens that are replaced
)
def sampled_padding_written_as_end_tokens(patch: Patch) -> None:
    """Where a completion holds the token that pads, the model reads the end token."""
    right: Any = TokenBatch._project

    def wrong(self: TokenBatch, *args: Any) -> Microbatch:
        found: Microbatch = right(self, *args)
        there = torch.from_numpy(found.layout.attention_mask)
        ids = torch.where(there & (found.input_ids == PADDING), END, found.input_ids)
        return replace(found, input_ids=ids)

    patch.setattr(TokenBatch, "_project", wrong)
