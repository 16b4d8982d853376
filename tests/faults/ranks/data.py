"""Faults of data parallelism: samples, denominators, replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine import trainer
from regress.engine.batch import TokenBatch
from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.trainer import Trainer
from regress.grpo.advantages import token_advantages
from regress.parallel.world import ProcessWorld
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    on_rank,
)


@fault(
    category="N",
    source="TRL PR#2824, Megatron PR#5983",
    cases=("dense",),
    variants=("dp2",),
    first="coverage",
    ranks=(),
    rules=("batch-left-out", "batch-twice"),
    status="coverage",
    says="was produced by no microbatch",
)
def same_samples_on_every_rank(patch: Patch) -> None:
    """All ranks read the first one's samples."""
    right: Any = TokenBatch.microbatches
    patch.setattr(TokenBatch, "microbatches", lambda self, plan, ranks, _: right(self, plan, ranks, 0))


@fault(
    category="N",
    source="prime-rl PR#1035, verl PR#5725",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    first="coverage",
    ranks=(),
    rules=("batch-left-out",),
    status="coverage",
    says="was produced by no microbatch",
)
def incomplete_microbatch_dropped(patch: Patch) -> None:
    """The samples that fill no whole microbatch are left out, on every rank."""
    right: Any = TokenBatch.microbatches
    patch.setattr(TokenBatch, "microbatches", lambda *args: right(*args)[:-1])


@fault(
    category="A",
    source="prime-rl PR#2359, TRL PR#3231",
    cases=("dapo",),
    variants=("dp2-dealt",),
    first="weights",
    ranks=(0, 1),
    # weights-world-size: the rank without tokens leaves the other its own count over the number of ranks
    rules=("mean-of-means", "weights-world-size"),
    update=0,
    also=(Shown("dapo", "dp2", "weights", ranks=(1,), update=0),),
)
def denominator_of_own_rank(patch: Patch) -> None:
    """Each rank divides by its own tokens, and the ranks are averaged."""
    right: Any = Trainer._laid_out

    def wrong(self: Trainer, *args: Any) -> Any:
        found = right(self, *args)
        own = max(sum(len(micro.select) for micro in found.microbatches), 1)
        weights = found.tokens.weights * len(found.tokens) / (own * dist.get_world_size())
        return replace(found, tokens=replace(found.tokens, weights=weights))

    patch.setattr(Trainer, "_laid_out", wrong)


@fault(
    category="I",
    source="AReaL#1419, slime#2230",
    cases=("dense",),
    variants=("dp2-dealt",),
    first="advantages",
    ranks=(0, 1),
    rules=("advantage-of-a-rank", "advantage-groups"),
)
def advantages_of_own_samples(patch: Patch) -> None:
    """A group whose samples lie on several ranks is compared on each of them with its own part."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Tensor:
        ranks = dist.get_world_size()
        return right(rewards, groups * ranks + torch.arange(len(groups)) % ranks, *args)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="C",
    source="Megatron#7452 finding 10",
    cases=("dense",),
    variants=("tp2",),
    first="ref_log_probs",
    ranks=(0, 1),
    rules=("reference",),
)
def log_probs_summed_over_all_ranks(patch: Patch) -> None:
    """Ranks that hold the same tokens are summed, too."""

    def wrong(self: ProcessWorld, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    patch.setattr(ProcessWorld, "sum", wrong)


@fault(
    category="C",
    source="NeMo Automodel PR#3822",
    cases=("dense",),
    variants=("dp2",),
    first="activations",
    ranks=(1,),
    rules=("weights-of-a-rank",),
)
def other_weights_on_a_rank(run: Run) -> None:
    """The initial weights were not broadcast."""
    if on_rank(1):
        for _, parameter in run.trainer.policy.named_parameters():
            local(parameter.data).mul_(1.01)


@fault(
    category="C",
    source="BLOOM-176B, DeepSpeed#1801",
    cases=("dense",),
    variants=("tp2",),
    first="replicas",
    ranks=(),
    rules=("replicas-drift",),
    names=r"activations/model\.norm|param/model\.norm\.weight",
    says="of rank 1 microbatch 0 differs from that of rank 0",
)
def last_bit_on_a_rank(run: Run) -> None:
    """A replicated weight drifts apart, by a rounding error so far."""
    if on_rank(1):
        weight = dict(run.trainer.policy.named_parameters())["model.norm.weight"].data
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))


# @@new
