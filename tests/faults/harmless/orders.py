"""Refactorings of the order in which things are exchanged, summed, sent back and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from regress.dump.taps import at
from regress.engine import taps, token_gradients
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.precision import arithmetic
from regress.engine.rollout import HFRolloutWorker
from regress.engine.sampling import Completion
from regress.parallel import ulysses
from regress.parallel.exchange import Group, swap
from tests.faults.fault import fault
from tests.faults.patch import Patch

WIDE = ("float64", "float32")


@fault(
    category="D",
    kind="harmless",
    fresh=True,
    cases=("dense", "gpt2"),
    variants=("cp2", "cp2-zigzag-packed-mbs4"),
    precisions=WIDE,
)
def exchanges_in_two_halves(patch: Patch) -> None:
    """Columns are exchanged for heads, and back, by two collectives with a half of them each."""

    def other(parts: Tensor, group: Group) -> Tensor:
        return torch.cat([swap(half, group) for half in parts.chunk(2, dim=2)], dim=2)

    patch.setattr(ulysses, "swap", other)


@fault(
    category="C",
    kind="harmless",
    fresh=True,
    variants=("tp2-sp", "dp2-tp2-sp-packed"),
    precisions=WIDE,
)
def products_summed_on_all_ranks_and_cut(patch: Patch) -> None:
    """Parts of a product are summed on every rank, which then keeps its columns of the sum."""

    def other(layouts: Sequence[Placement], _: bool, __: nn.Module, outputs: DTensor, ___: Any) -> Tensor:
        whole = outputs.redistribute(placements=[Replicate()])
        return whole.redistribute(placements=list(layouts)).to_local()

    patch.setattr(RowwiseParallel, "_prepare_output_fn", staticmethod(other))


@fault(
    category="R",
    kind="harmless",
    fresh=True,
    cases=("dense", "dr_grpo"),
    variants=("mbs4", "packed-mbs3"),
    precisions=WIDE,
)
def one_backward_pass_for_all_microbatches(patch: Patch) -> None:
    """All microbatches run forward, and the sum of their shares of the loss goes back at once."""

    def other(self: LocalPolicy, microbatches: Sequence[Microbatch], loss: Any) -> list[Any]:
        shares, results = [], []
        for index, micro in enumerate(microbatches):
            with at(micro=taps.number(index)):
                taps.inputs(micro)
                share, result = loss(micro, self._forward(micro, entropy=self._entropy))
            shares.append(share)
            results.append(result)
        with arithmetic(self.dtype):
            self._backward(torch.stack(shares).sum())
        token_gradients.write()
        return results

    patch.setattr(LocalPolicy, "forward_backward", other)


@fault(
    category="V",
    kind="harmless",
    fresh=True,
    cases=("rollout",),
    variants=("base", "rollout-dp2-batch5"),
)
def prompts_of_a_batch_in_reverse(patch: Patch) -> None:
    """The prompts of a batch are sampled from the last to the first, each by its own stream."""
    right: Any = HFRolloutWorker.complete

    def other(self: Any, prompts: Any, params: Any, keys: Any, limits: Any) -> list[Completion]:
        found: list[Completion] = right(self, prompts[::-1], params, keys[::-1], limits[::-1])
        return found[::-1]

    patch.setattr(HFRolloutWorker, "complete", other)
