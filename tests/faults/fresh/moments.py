"""Faults of clipping and moments where parameters are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from tests.faults.fault import fault
from tests.faults.optimizer import around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank
from tests.faults.rounding import rounded


@fault(
    category="L",
    fresh=True,
    source="torchtitan#766: clipping of the list of split parameters alone",
    cases=("tied",),
    variants=("tp2-pp2-mbs4",),
    first="optimizer",
    names=r".*norm\.weight/exp_avg(_sq)?",
    rules=(
        "clip-of-gradients-left-out",
        "clip-of-gradients",
        "state-of-a-rank-unclipped",
    ),  # gradients of norms, which are whole on every rank, are not clipped
)
def whole_parameters_not_clipped(patch: Patch) -> None:
    """All gradients enter the norm, and only those of parameters that are split over ranks are clipped by it."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        found = [p for _, p in self.named_parameters() if p.grad is not None and not isinstance(p, DTensor)]
        before = [(p.grad, p.grad.clone()) for p in found if p.grad is not None]
        norm: Tensor = right(self, limit)
        for grad, known in before:
            grad.copy_(known)
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="M",
    kind="precision",
    fresh=True,
    source="Megatron#1359: a part of the optimizer that one rank keeps in half precision",
    variants=("fsdp2-tp2-mbs3",),
    first="optimizer",
    names=r".*/exp_avg_sq",
    ranks=(1,),
    rules=(
        "state-of-a-rank",
        "state-of-a-rank-unclipped",
        "rounded",
        "precision",
    ),  # the second one names moments that are changed after they were made
)
def second_moments_of_a_rank_in_bfloat16(patch: Patch) -> None:
    """One rank keeps its parts of the second moments in half precision, behind each update."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        update()
        if on_rank(1):
            for state in optimizer.state.values():
                own = local(state["exp_avg_sq"])
                own.copy_(rounded(own))

    around_the_update(patch, wrong)
