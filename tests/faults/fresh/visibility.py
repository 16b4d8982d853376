"""Faults of what tokens see, and of where packed samples believe that they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import policy
from regress.engine.attention import block_causal_mask
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.policy import LocalPolicy
from regress.engine.reference import Reference
from regress.layout import TokenLayout
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION

GROUP = 3
"""Samples of a prompt in the golden cases, which lie side by side."""


@fault(
    category="G",
    fresh=True,
    source="a packed collator whose positions begin at 0 once, and then at the length that was added",
    cases=("gpt2",),
    variants=("packed-mbs3",),
    first="batch_inputs position_ids",
    rules=("position-ids",),  # names samples that are packed
)
def positions_of_later_samples_from_one(patch: Patch) -> None:
    """Position ids of a packed row begin at 0 with its first sample, and at 1 with every other one."""
    right: Any = TokenBatch._project

    def wrong(self: TokenBatch, *args: Any) -> Microbatch:
        found: Microbatch = right(self, *args)
        ids = found.position_ids.clone()
        for segment in found.layout.segments:
            if segment.col > 0:
                ids[segment.row, segment.col : segment.col + segment.stop - segment.start] += 1
        return replace(found, position_ids=ids)

    patch.setattr(TokenBatch, "_project", wrong)


@fault(
    category="G",
    fresh=True,
    source="a mask for shared prompts, by which completions of one group see each other",
    variants=("dp2-packed-budget48",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
    rules=("packed-leak", "module", "inputs-hold"),
)
def samples_of_a_group_see_each_other(patch: Patch) -> None:
    """The mask of a packed row parts groups of samples, so that a sample sees those of its group before it."""

    def wrong(layout: TokenLayout, *rest: Any) -> Tensor:
        joined = tuple(one._replace(sample=one.sample // GROUP) for one in layout.segments)
        found: Tensor = block_causal_mask(TokenLayout(layout.shape, joined), *rest)
        return found

    patch.setattr(policy, "block_causal_mask", wrong)


@fault(
    category="J",
    fresh=True,
    source="a reference behind a service whose tokenizer adds no token at the beginning",
    variants=("packed-mbs3",),
    first="ref_log_probs ref_log_probs",
    rules=("reference", "inputs-hold"),
)
def reference_does_not_see_first_tokens(patch: Patch) -> None:
    """No token of the reference sees the first one of its sample, which the policy's tokens see."""
    attention: Any = LocalPolicy._attention
    scores: Any = Reference.log_probs
    asked = [False]

    def wrong(self: LocalPolicy, micro: Microbatch) -> dict[str, object]:
        found: dict[str, object] = attention(self, micro)
        mask = found["attention_mask"]
        if not asked[0] or not isinstance(mask, Tensor):
            return found
        hidden = torch.zeros(micro.layout.shape, dtype=torch.bool)
        for segment in micro.layout.segments:
            hidden[segment.row, segment.col] = True
        itself = torch.eye(mask.shape[-1], dtype=torch.bool)
        return {"attention_mask": mask & (~hidden[:, None, None, :] | itself)}

    def noted(self: Reference, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        asked[0] = True
        try:
            found: list[Tensor] = scores(self, microbatches)
            return found
        finally:
            asked[0] = False

    patch.setattr(LocalPolicy, "_attention", wrong)
    patch.setattr(Reference, "log_probs", noted)
