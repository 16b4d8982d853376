"""Semantic faults that show where strategies meet: sums, norms, schedules and reports of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from regress.engine import optim, step
from regress.engine.build import Run
from regress.engine.step import StepOutcome
from regress.parallel import policy, sharded
from regress.parallel.pipeline import Pipeline
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import EMBEDDED, EXPERTS, without

BLIND = ("allclose", "mean 1e-3")
BACKWARD = ("loss 5 %", "loss 1 %", *BLIND)


@fault(
    names=r"training_step/ratio/(min|max)",
    category="U",
    fresh=True,
    first="metrics",
    source="verl: every metric of all ranks by numpy.mean",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    rules=("reported-over-ranks", "reported"),
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", *BLIND),
)
def extremes_averaged_over_ranks(patch: Patch) -> None:
    """Report the mean over ranks of the least and of the greatest ratio."""
    right: Any = step._combined

    def wrong(world: Any, own: Any, norm: Tensor) -> StepOutcome:
        outcome = right(world, own, norm)
        parts = [part.metrics for part in world.gather(own)]
        changed = dict(outcome.metrics)
        for name in ("ratio/min", "ratio/max"):
            values = [part[name].value for part in parts if name in part and part[name].count]
            if values:
                changed[name] = replace(changed[name], total=sum(values) / len(values))
        return replace(outcome, metrics=changed)

    patch.setattr(step, "_combined", wrong)


@fault(
    category="L",
    fresh=True,
    source="torchtitan#766, NeMo-RL PR#3788",
    variants=("dp2-fsdp2-tp2",),
    first="grad_norm",
    rules=("norm-of-a-part",),
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", *BLIND),
)
def norm_over_tensor_ranks_alone(patch: Patch) -> None:
    """Squares of norms are summed over the ranks that share matrices, and not over those that share shards."""

    def wrong(self: ParallelPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        squares = [norm.double().square() for norm in norms.values()]
        total = torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum()
        group = self._world.group("tp")
        if group is not None:
            dist.all_reduce(total, group=group)
        return total.sqrt().to(self.log_prob_dtype)

    patch.setattr(ParallelPolicy, "_total_norm", wrong)


@fault(
    category="L",
    fresh=True,
    source="Megatron#7452 finding 8, DeepSpeed#8475",
    variants=("fsdp2-pp2-budget72",),
    first="grad_norm",
    rules=("norm-of-a-part",),
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", *BLIND),
)
def shards_counted_by_name(patch: Patch) -> None:
    """Only the shard on the lowest rank enters the norm, of all that a parameter has."""
    right: Any = ParallelPolicy._total_norm

    def wrong(self: ParallelPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        known = self._owned
        earlier = [name for part in self._world.gather(list(known))[: self._world.rank] for name in part]
        self._owned = known - set(earlier)
        try:
            return right(self, norms)
        finally:
            self._owned = known

    patch.setattr(ParallelPolicy, "_total_norm", wrong)


@fault(
    category="B",
    fresh=True,
    source="Megatron PR#3693: several instances of a distributed optimizer",
    variants=("dp2-fsdp2-hsdp-mbs3",),
    first="gradient",
    rules=("reduction", "not-reduced"),
    blind=BACKWARD,
)
def replicas_of_shards_not_summed(patch: Patch) -> None:
    """Gradients are summed over shards, and not over the groups of ranks that hold the same shards."""
    right: Any = sharded.apply

    def wrong(model: Any, mesh: Any, **rest: Any) -> None:
        right(model, mesh["fsdp"] if mesh.ndim > 1 else mesh, **rest)

    patch.setattr(sharded, "apply", wrong)


@fault(
    category="F",
    fresh=True,
    source="Megatron PR#5916",
    cases=("moe",),
    variants=("dp2-ep2",),
    first="gradient",
    names=EXPERTS,
    ranks=(0, 1, 2, 3),
    rules=("experts-reduced", "not-reduced", "reduction", "gradients"),
    blind=BACKWARD,
)
def experts_not_summed_over_replicas(run: Run) -> None:
    """Gradients of experts stay with the rank that owns them, and each expert has an owner in each replica."""
    without(run, ".experts.")


@fault(
    category="E",
    fresh=True,
    source="Megatron#844, Megatron#656",
    cases=("tied",),
    variants=("tp2-pp2-mbs4",),
    first="gradient",
    names=EMBEDDED,
    rules=(
        "tied-embeddings",
        "not-reduced",
    ),  # one rank alone stays away from the sum
    blind=BACKWARD,
)
def tied_gradient_summed_on_one_tensor_rank(patch: Patch) -> None:
    """Stages exchange the gradients of one part of the tied weight, and keep their own of the other."""
    right: Any = ParallelPolicy.forward_backward
    sums: Any = Pipeline.sum_tied
    place = [0]

    def noted(self: ParallelPolicy, *args: Any) -> Any:
        place[0] = self._world.mesh.coordinates(self._world.rank)["tp"]
        return right(self, *args)

    patch.setattr(ParallelPolicy, "forward_backward", noted)
    patch.setattr(Pipeline, "sum_tied", lambda self: sums(self) if place[0] == 0 else None)


@fault(
    category="M",
    fresh=True,
    source="accelerate PR#999, transformers PR#24088",
    cases=("on_policy",),
    variants=("dp2",),
    first="param",
    steps=None,
    rules=("learning-rate",),
)
def schedule_stepped_by_every_rank(patch: Patch) -> None:
    """The schedule makes as many steps after an update as there are ranks."""
    right: Any = get_scheduler

    def wrong(*args: Any, **rest: Any) -> LRScheduler:
        found: Any = right(*args, **rest)
        one: Any = found.step

        def several() -> None:
            for _ in range(dist.get_world_size()):
                one()

        found.step = several
        made: LRScheduler = found
        return made

    patch.setattr(optim, "get_scheduler", wrong)


@fault(
    category="B",
    fresh=True,
    source="lerobot#3668, minimind#853: a rank that goes another way",
    cases=("gpt2",),
    variants=("dp2-left-mbs5",),
    first="token_gradient",
    ranks=(1,),
    rules=(
        "token-gradient-scale",
        "token-gradient-power-of-two",
        "token-gradient-denominators",
        "token-gradient-of-ranks",
    ),  # the factor is the number of ranks, on the rank that is named
    blind=("loss 5 %", "loss 1 %", *BLIND),
)
def last_rank_enters_with_half_its_loss(patch: Patch) -> None:
    """The last rank divides its loss by two on its way into the backward pass, and the others do not."""
    right: Any = ParallelPolicy._backward

    def wrong(self: ParallelPolicy, share: Tensor) -> None:
        right(self, share / 2 if dist.get_rank() == dist.get_world_size() - 1 else share)

    patch.setattr(policy.ParallelPolicy, "_backward", wrong)
