"""Faults of updates: what corrects their moments, which rows they reach, and the rate of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from regress.engine.batch import Microbatch
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from tests.faults.fault import fault
from tests.faults.fresh.updates import Moments, with_direction
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank


@fault(
    category="M",
    fresh=True,
    source="starVLA PR#210: a counter that accumulation raises in every microbatch",
    first=f"param {EMBEDDING}",
    rules=("bias-correction", "optimizer-settings", "inputs-hold"),
)
def bias_corrected_for_every_microbatch(patch: Patch) -> None:
    """Moments are corrected for as many updates as there were microbatches; their own counter is right."""
    passes: Any = LocalPolicy.forward_backward
    count = [1]

    def noted(self: LocalPolicy, microbatches: Sequence[Microbatch], *rest: Any) -> Any:
        count[0] = len(microbatches)
        return passes(self, microbatches, *rest)

    def wrong(moments: Moments) -> tuple[Tensor, Tensor]:
        counted = replace(moments, number=moments.number * count[0])
        mean = counted.first / (1 - counted.beta1**counted.number)
        return mean, (counted.second / (1 - counted.beta2**counted.number)).sqrt() + counted.eps

    patch.setattr(LocalPolicy, "forward_backward", noted)
    with_direction(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="a distributed optimizer that copies back as many rows as divide equally",
    variants=("fsdp4-mbs2",),
    first=f"param {EMBEDDING}",
    names=r"model\.embed_tokens\.weight|lm_head\.weight",
    ranks=(0, 1, 2),  # of 14 rows ranks hold 4, 4, 4 and 2, and an equal share is 3
    # optimizer-settings: names what is done to parameters afterwards
    rules=("no-update", "state-of-a-rank", "optimizer-settings", "inputs-hold"),
)
def rows_beyond_an_equal_share_not_updated(patch: Patch) -> None:
    """Update no more rows of a rank's part of a weight than all ranks could have alike; moments are right."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before = [local(p.detach()).clone() for p in params]
        update()
        for parameter, known in zip(params, before, strict=True):
            share = parameter.shape[0] // dist.get_world_size()
            local(parameter.detach())[share:].copy_(known[share:])

    around_the_update(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="accelerate PR#999: a schedule that the first process alone steps",
    cases=("on_policy",),
    variants=("dp2",),
    first="param",
    ranks=(1,),
    steps=None,
    # the rate of the first update is 0, and stays so on this rank
    rules=("learning-rate", "state-of-a-rank", "step-left-out", "optimizer-settings", "inputs-hold"),
)
def schedule_of_a_rank_not_stepped(patch: Patch) -> None:
    """One rank never goes on with its learning rate, which rises from 0 on the others."""
    right: Any = Trainer._schedule

    def wrong(self: Trainer, outcome: Any) -> None:
        if not on_rank(1):
            right(self, outcome)

    patch.setattr(Trainer, "_schedule", wrong)
