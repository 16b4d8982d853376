"""Faults of what is taken for padding, of masks that leave it out, and of rewards that a cut takes away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine import policy, trainer
from regress.engine.attention import block_causal_mask
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.rewards import rewards_of
from regress.grpo.logprobs import token_log_probs
from regress.layout import TokenLayout
from tests.faults.fault import fault
from tests.faults.fresh.attention import AFTER_BLOCK_0
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION

PADDING = 0
"""Id of padding in the golden cases."""


@fault(
    category="Q",
    fresh=True,
    source="attention_mask = input_ids != pad_token_id",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=(
        "module",
        "attention-mask",
    ),  # the last one names a token of the text with the id of padding
)
def tokens_with_the_id_of_padding_not_seen(patch: Patch) -> None:
    """A token of a completion that has the id of padding is masked for all that come behind it."""
    right: Any = LocalPolicy._attention

    def wrong(self: LocalPolicy, micro: Microbatch) -> dict[str, object]:
        mask = right(self, micro)["attention_mask"]
        text = (micro.input_ids != PADDING)[:, None, None, :]
        itself = torch.eye(mask.shape[-1], dtype=torch.bool)
        return {"attention_mask": mask & (text | itself)}

    patch.setattr(LocalPolicy, "_attention", wrong)


@fault(
    category="Q",
    fresh=True,
    source="verl: a penalty of overlong completions that replaces their reward",
    variants=("packed-dynamic",),
    first="advantages advantages",
    rules=(
        "advantage-zero",  # names rewards that are not passed on; one group has no advantage any more
        "advantage-groups",  # accepted after the first run: names other rewards
    ),
)
def truncated_completions_earn_nothing(patch: Patch) -> None:
    """Completions that were cut off have the reward 0, whatever they were given."""
    right: Any = rewards_of

    def wrong(samples: Sequence[Trajectory], *rest: Any) -> Any:
        values, weights = right(samples, *rest)
        ended = [
            0.0 if one.finish_reason == "length" else value
            for one, value in zip(samples, values, strict=True)
        ]
        return ended, weights

    patch.setattr(trainer, "rewards_of", wrong)


@fault(
    category="G",
    fresh=True,
    source="TRL#6800: a mask made of lengths, for rows that are padded on their left",
    cases=("gpt2",),
    variants=("dp2-left-mbs5",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=("padding-seen", "attention-mask", "module"),  # the second one names another side
)
def mask_of_padding_on_the_other_side(patch: Patch) -> None:
    """Rows are padded on their left, and the mask takes the last columns of each for padding."""
    right: Any = block_causal_mask

    def wrong(layout: TokenLayout, *rest: Any) -> Tensor:
        moved = tuple(segment._replace(col=0) for segment in layout.segments)
        found: Tensor = right(TokenLayout(layout.shape, moved), *rest)
        return found

    patch.setattr(policy, "block_causal_mask", wrong)


@fault(
    category="H",
    fresh=True,
    source="a list of forbidden tokens that training takes over from sampling",
    variants=("vocab8",),
    first="log_probs log_probs",
    rules=("log-softmax",),  # names a mask of the vocabulary
)
def padding_left_out_of_the_softmax(patch: Patch) -> None:
    """The token that pads has the probability 0 in training, and others share what it had."""
    right: Any = token_log_probs

    def wrong(logits: Tensor, *args: Any, **rest: Any) -> Any:
        padding = torch.arange(logits.shape[-1]) == PADDING
        return right(logits.masked_fill(padding, -torch.inf), *args, **rest)

    patch.setattr(policy, "token_log_probs", wrong)
