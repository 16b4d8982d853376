"""Faults of parameters and optimizer states on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regress.engine import optim
from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    AFTER_ATTENTION,
    exchanged,
    on_rank,
)


@fault(
    category="M",
    source="Megatron PR#6920, accelerate#2665",
    cases=("dense",),
    variants=("dp2",),
    first="optimizer",
    ranks=(1,),
    rules=("state-of-a-rank",),
    also=(Shown("dense", "fsdp2", "optimizer", ranks=(1,)),),
)
def update_lost_on_a_rank(patch: Patch) -> None:
    """One rank does not see what the optimizer has made of its part."""
    if on_rank(1):
        patch.setattr(optim, "update", lambda _: None)


@fault(
    precisions=("float64", "float32"),
    category="M",
    source="verl#5070",
    cases=("dense",),
    variants=("dp2",),
    first="param",
    ranks=(1,),
    rules=("state-of-a-rank", "weight-decay"),
)
def decay_on_one_rank_only(run: Run) -> None:
    if on_rank(1):
        for group in run.trainer.optimizer.param_groups:
            group["weight_decay"] = 0.0


@fault(
    precisions=("float64", "float32"),
    category="M",
    source="Megatron PR#5976",
    cases=("dense",),
    variants=("dp2",),
    first="optimizer",
    ranks=(1,),
    rules=("step-counter", "state-of-a-rank"),
    names=r".*/step",
)
def counter_ahead_on_a_rank(run: Run) -> None:
    if on_rank(1):
        for state in run.trainer.optimizer.state.values():
            state["step"] += 1


@fault(
    category="N",
    source="Megatron PR#6858",
    cases=("dense",),
    variants=("fsdp2",),
    first="optimizer",
    ranks=(0, 1),
    # state-of-a-rank-unclipped: every rank is wrong, and the state that was exchanged is named
    rules=("state-of-a-rank", "state-of-a-rank-unclipped"),
    names=r".*/exp_avg",
)
def state_of_another_shard(run: Run) -> None:
    """Each rank resumes from the optimizer state of the other."""
    states = run.trainer.optimizer.state
    named = run.trainer.policy.named_parameters()
    exchanged({name: states[parameter]["exp_avg"] for name, parameter in named})


@fault(
    category="N",
    source="ROCm Megatron-LM PR#63",
    cases=("dense",),
    variants=("fsdp2",),
    first="activations",
    ranks=(0, 1),
    rules=("module",),
    names=AFTER_ATTENTION,
)
def shards_exchanged(run: Run) -> None:
    """Two ranks hold each other's part of a weight."""
    name = "model.layers.0.self_attn.v_proj.weight"
    exchanged({name: dict(run.trainer.policy.named_parameters())[name]})


@fault(
    category="M",
    source="Megatron#950",
    cases=("dapo",),
    variants=("fsdp2",),
    first="activations",
    ranks=(0, 1),
    rules=("stale-weights",),
    update=1,
)
def stale_part_on_a_rank(patch: Patch) -> None:
    """Forward and backward passes gather what one rank had before the last update."""
    right: Any = ParallelPolicy.forward_backward
    before: dict[str, Tensor] = {}

    def wrong(self: ParallelPolicy, *args: Any) -> Any:
        parts = {name: local(parameter.data) for name, parameter in self.named_parameters()}
        now = {name: part.clone() for name, part in parts.items()}
        if on_rank(1) and before:
            for name, part in parts.items():
                part.copy_(before[name])
        before.update(now)
        results = right(self, *args)
        for name, parameter in self.named_parameters():
            local(parameter.data).copy_(now[name])
        return results

    patch.setattr(ParallelPolicy, "forward_backward", wrong)


# @@new
