"""Faults of one process in what is trained on, in packing, and in the order of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.attention import VarlenSegments
from regress.engine.batch import LossTokens, Microbatch
from regress.engine.policy import LocalPolicy
from regress.layout import TokenLayout
from tests.faults.fault import fault
from tests.faults.inputs import masks
from tests.faults.patch import Patch

MASK = "batch_inputs response_mask"


@fault(
    category="Q",
    fresh=True,
    source="TRL#5144",
    cases=("tools",),
    first=MASK,
    rules=("loss-mask",),
)
def tokens_behind_a_length_masked(patch: Patch) -> None:
    """Tokens of a completion behind the eighth are not trained on: its mask is cut at another length."""

    def change(sample: Trajectory) -> list[int]:
        first = sample.prompt_length + 8
        return [m if at < first else 0 for at, m in enumerate(sample.loss_mask)]

    masks(patch, change)


@fault(
    category="Q",
    fresh=True,
    source="NeMo-RL PR#2176: the history of a conversation taken for its prompt",
    cases=("tools",),
    first=MASK,
    rules=("loss-mask",),
)
def only_the_last_turn_trained(patch: Patch) -> None:
    """Only the last completion of a conversation of several turns is trained on."""

    def change(sample: Trajectory) -> list[int]:
        mask = list(sample.loss_mask)
        at = len(mask)
        while at and mask[at - 1]:
            at -= 1
        return [0] * at + mask[at:]

    masks(patch, change)


@fault(
    category="Q",
    fresh=True,
    source="MemGen PR#33: padding and end token share an id",
    cases=("tools",),
    first=MASK,
    rules=("loss-mask", "last-token-masked"),
)
def end_tokens_taken_for_padding(patch: Patch) -> None:
    """Every token with the id that ends a sample is masked, inside of a conversation, too."""

    def change(sample: Trajectory) -> list[int]:
        if sample.finish_reason == "length":
            return list(sample.loss_mask)
        end = sample.tokens[-1]
        return [m * int(token != end) for token, m in zip(sample.tokens, sample.loss_mask, strict=True)]

    masks(patch, change)


@fault(
    category="G",
    fresh=True,
    source="SkyRL PR#2096, verl#2185",
    cases=("dr_grpo",),
    variants=("longest-first",),
    first="advantages advantages",
    rules=(
        "order-not-restored",
        "advantage-tokens",
    ),  # the last one names tokens that get advantages of other samples
    silent={"dr_grpo/mbs4": "samples keep their order"},
)
def advantages_dealt_in_the_order_of_the_batch(patch: Patch) -> None:
    """Microbatches of sorted samples get the advantages in the order of the batch, as long as there are some."""
    right: Any = LossTokens.select
    place = [0]

    def wrong(self: LossTokens, index: Tensor, *rest: Any) -> LossTokens:
        found: LossTokens = right(self, index, *rest)
        if self.advantages is None:
            return found
        stop = place[0] + len(index)
        own = self.advantages[place[0] : stop]
        place[0] = stop % len(self)
        return replace(found, advantages=own)

    patch.setattr(LossTokens, "select", wrong)


@fault(
    category="G",
    fresh=True,
    source="ms-swift PR#9904: borders that do not belong to these samples",
    variants=("varlen-mbs4",),
    first="activations model.layers.0",
    tokens="behind another",
    probe="log_probs",
    rules=(
        "packed-leak",
        "module",
    ),  # the last one names the mask of the attention
)
def lengths_of_segments_sorted(patch: Patch) -> None:
    """Lengths of segments were sorted, the longest first, and their tokens were not."""
    right: Any = VarlenSegments.of

    def wrong(layout: TokenLayout, local: Tensor) -> VarlenSegments:
        found = right(layout, local)
        return VarlenSegments(found.index, tuple(sorted(found.lengths, reverse=True)))

    patch.setattr(VarlenSegments, "of", wrong)


@fault(
    category="G",
    fresh=True,
    source="unsloth PR#6738: positions that are clipped at the length of a table",
    cases=("gpt2",),
    first="activations transformer.wpe",
    rules=("long-context", "positions-not-passed"),
)
def positions_end_at_sixteen(patch: Patch) -> None:
    """The model is given position 15 for every token behind it: a table of another length."""
    right: Any = LocalPolicy._run

    def wrong(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        return right(self, model, replace(micro, position_ids=micro.position_ids.clamp(max=15)), *rest)

    patch.setattr(LocalPolicy, "_run", wrong)


@fault(
    category="G",
    fresh=True,
    source="transformers PR#46634: a mask of padding that is turned",
    cases=("gpt2",),
    variants=("varlen",),
    first="activations transformer.h.0",
    rules=(
        "packed-leak",
        "module",
    ),  # the last one names the mask of the attention
)
def first_two_segments_joined(patch: Patch) -> None:
    """The first border between segments is missing, so that the second sample sees the first one."""
    right: Any = VarlenSegments.of

    def wrong(layout: TokenLayout, local: Tensor) -> VarlenSegments:
        found = right(layout, local)
        lengths = found.lengths
        return VarlenSegments(found.index, (sum(lengths[:2]), *lengths[2:]))

    patch.setattr(VarlenSegments, "of", wrong)
