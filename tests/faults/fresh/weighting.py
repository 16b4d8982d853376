"""Faults of the weights of tokens: groups that do not count, and lengths that are a rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.batch import LossTokens
from regress.engine.trainer import MiniBatch, Trainer
from regress.grpo.segments import segment_lengths, segment_sum
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="A",
    fresh=True,
    source="DAPO: groups without advantage that are filtered out of the denominator alone",
    cases=("tools",),
    variants=("dynamic",),
    first="weights weights",
    rules=("weights-denominator",),  # names the samples that are counted
)
def groups_without_advantage_not_counted(patch: Patch) -> None:
    """The denominator counts the samples that have an advantage, and all samples enter the sum."""
    right: Any = Trainer.mini_batches

    def wrong(self: Trainer, samples: Sequence[Trajectory]) -> list[MiniBatch]:
        return [replace(mini, tokens=_of_informative(mini.tokens)) for mini in right(self, samples)]

    patch.setattr(Trainer, "mini_batches", wrong)


def _of_informative(tokens: LossTokens) -> LossTokens:
    assert tokens.advantages is not None
    assert tokens.weights is not None
    sizes = segment_sum(tokens.advantages.abs(), tokens.sequence, tokens.num_sequences)
    counted = max(int((sizes > 0).sum()), 1)
    return replace(tokens, weights=tokens.weights * (tokens.num_sequences / counted))


@fault(
    category="A",
    fresh=True,
    source="Megatron#7452 findings 3 and 9: a length that is counted behind the split of the sequence",
    variants=("cp2-zigzag-packed-mbs4",),
    first="weights",
    # mean-of-means: names a denominator that is counted on a rank alone
    rules=("weights-denominator", "mean-of-means"),
)
def length_on_the_rank_divides_a_sample(patch: Patch) -> None:
    """The mean over a sample divides by the number of its tokens on this rank, not on all ranks that share it."""
    right: Any = LossTokens.select

    def wrong(self: LossTokens, index: Tensor, sequence: Tensor, count: int) -> LossTokens:
        found: LossTokens = right(self, index, sequence, count)
        assert found.weights is not None
        lengths = segment_lengths(sequence, count)[sequence]
        own = torch.ones_like(found.weights) / (self.num_sequences * lengths)
        return replace(found, weights=own)

    patch.setattr(LossTokens, "select", wrong)
