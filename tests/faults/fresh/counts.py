"""Faults of what a loss is divided by: tokens of other ranks, of other mini-batches, and another length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from regress.engine.trainer import MiniBatch, Trainer
from tests.faults.fault import fault
from tests.faults.patch import Patch

Factor = Callable[[Trainer], float]


def divided(patch: Patch, factor: Factor) -> None:
    """Multiply the weight of every loss token by a factor."""
    right: Any = Trainer._laid_out

    def wrong(self: Trainer, *args: Any) -> MiniBatch:
        return times(right(self, *args), factor(self))

    patch.setattr(Trainer, "_laid_out", wrong)


def times(mini: MiniBatch, factor: float) -> MiniBatch:
    """Return a mini-batch whose weights are multiplied by a factor."""
    weights: Tensor | None = mini.tokens.weights
    assert weights is not None
    return replace(mini, tokens=replace(mini.tokens, weights=weights * factor))


@fault(
    category="A",
    fresh=True,
    source="NeMo Automodel PR#3830, verl#2857: samples counted by an all-reduce over ranks that share them",
    variants=("dp2-cp2-packed",),
    first="weights weights",
    rules=(
        "weights-world-size",
        "weights-denominator",
    ),  # the last one names the samples that the denominator counts
)
def samples_counted_on_every_context_rank(patch: Patch) -> None:
    """The number of samples that divides is summed over context-parallel ranks, too, which hold the same ones."""
    divided(patch, lambda trainer: 1.0 / trainer.world.plan.mesh.sizes["cp"])


@fault(
    category="A",
    fresh=True,
    source="Dr. GRPO: max_model_len for max_tokens as the constant",
    cases=("dr_grpo",),
    variants=("packed-longest-first",),
    first="weights weights",
    rules=("weights-denominator",),  # names norm_length
)
def limit_of_the_whole_sequence_divides(patch: Patch) -> None:
    """The constant that divides is the limit of prompt and completion together, not that of completions."""

    def factor(trainer: Trainer) -> float:
        data = trainer.config.data
        return data.max_completion_length / data.max_seq_length

    divided(patch, factor)


@fault(
    category="A",
    fresh=True,
    source="TRL: num_items_in_batch of the generation batch, and a loss of one of its mini-batches",
    cases=("dapo",),
    variants=("reversed",),
    first="weights weights",
    rules=("weights-denominator",),  # names the tokens that are counted
)
def tokens_of_the_whole_rollout_divide(patch: Patch) -> None:
    """Each mini-batch is divided by the tokens of all mini-batches of its rollout."""
    right: Any = Trainer._cut

    def wrong(self: Trainer, *args: Any) -> list[MiniBatch]:
        minis: list[MiniBatch] = right(self, *args)
        total = sum(len(mini.tokens) for mini in minis)
        return [times(mini, len(mini.tokens) / total) for mini in minis]

    patch.setattr(Trainer, "_cut", wrong)
