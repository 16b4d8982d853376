"""Faults in the sums of gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel import (
    policy,
    reduction,
    sharded,
)
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    HEAD_NORMS,
    on_rank,
    sums_of,
)


@fault(
    category="B",
    source="TRL PR#3938",
    cases=("dense",),
    variants=("dp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("gradient-averaged-over-ranks",),
    also=(Shown("dense", "cp2", "gradient", ranks=(0, 1)),),
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", "allclose", "mean 1e-3"),
)
def averaged_over_ranks(patch: Patch) -> None:
    """Shares of the loss whose sum is the whole are averaged."""
    right: Any = reduction.sum_gradients

    def wrong(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        right(parameters, groups)
        for names, group in groups:
            for name in names:
                gradient = parameters[name].grad
                assert gradient is not None
                local(gradient).div_(group.size())

    patch.setattr(policy, "sum_gradients", wrong)


@fault(
    category="B",
    source="FSDP2: its own divide factor",
    cases=("dense",),
    variants=("fsdp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("gradient-averaged-over-ranks",),
    also=(Shown("dense", "dp2-fsdp2-hsdp-mbs3", "gradient", ranks=(0, 1, 2, 3)),),
)
def averaged_over_shards(patch: Patch) -> None:
    """FSDP as it comes: it divides by the number of ranks."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
    patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


@fault(
    category="B",
    source="TRL PR#3938",
    cases=("dense",),
    variants=("dp2-ddp",),
    first="token_gradient",
    ranks=(0, 1),
    rules=("token-gradient-of-ranks",),
)
def averaged_by_ddp(patch: Patch) -> None:
    """DDP averages, and nobody multiplies."""
    patch.setattr(ParallelPolicy, "_backward", lambda self, share: self._replicas.backward(share))


@fault(
    category="A",
    source="NeMo Automodel PR#3830",
    cases=("dense",),
    variants=("dp2",),
    first="token_gradient",
    ranks=(0, 1),
    rules=("token-gradient-of-ranks",),
    also=(Shown("dense", "cp2", "token_gradient", ranks=(0, 1)),),
)
def loss_times_ranks(patch: Patch) -> None:
    """A factor against an average that nobody takes."""
    right: Any = ParallelPolicy._backward
    patch.setattr(ParallelPolicy, "_backward", lambda self, share: right(self, share * dist.get_world_size()))


@fault(
    precisions=("float64", "float32"),
    category="D",
    source="VeOmni PR#1115",
    cases=("dense",),
    variants=("cp2",),
    first="gradient",
    ranks=(0, 1),
    # norms-not-summed: of tp2, where the norms of heads are all that must be summed
    rules=("reduction", "not-reduced", "norms-not-summed"),
    also=(
        Shown("dense", "dp2-fsdp2", "gradient", ranks=(0, 1, 2, 3)),
        Shown("dense", "tp2", "gradient", ranks=(0, 1), names=HEAD_NORMS),
    ),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def sums_left_out(run: Run) -> None:
    """No gradient is summed over ranks after the backward pass."""
    sums_of(run).clear()


@fault(
    category="C",
    source="torch.distributed.nn.functional.all_reduce sums again in its backward pass",
    cases=("dense",),
    variants=("tp2",),
    first="gradient",
    ranks=(0, 1),
    # gradient-averaged-over-ranks: it says that whole gradients are summed over the ranks, which they are
    rules=("gradient-power-of-two", "gradient-averaged-over-ranks"),
    names=HEAD_NORMS,
)
def summed_twice(run: Run) -> None:
    """Once by a hook, and once more by the step."""
    found = sums_of(run)
    found += list(found)


@fault(
    category="C",
    source="transformers 5.23 ReplicatedWithGradAllReduce, picotron PR#5",
    cases=("dense",),
    variants=("tp2-mbs6",),
    first="gradient",
    ranks=(0, 1),
    rules=("accumulation", "summed-in-every-microbatch"),
    names=HEAD_NORMS,
    also=(Shown("tools", "dp2-packed-budget48", "gradient", ranks=(0, 1)),),
)
def summed_in_every_microbatch(run: Run) -> None:
    """The gradients accumulated so far are summed after each backward pass: earlier ones again and again."""
    model: Any = run.trainer.policy
    groups = [*sums_of(run)]
    sums_of(run).clear()
    right: Any = model._backward

    def wrong(share: Tensor) -> None:
        right(share)
        reduction.sum_gradients(dict(model.named_parameters()), groups)

    model._backward = wrong


@fault(
    category="B",
    source="minimind#853",
    cases=("dense",),
    variants=("dp2-ddp",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction", "not-reduced"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def ddp_bypassed(run: Run) -> None:
    """The model inside the wrapper is called, so that no hook is armed."""
    assert run.trainer.policy._callable is not run.trainer.policy.model
    run.trainer.policy._callable = run.trainer.policy.model


@fault(
    category="B",
    source="FunASR PR#3472, build-nanogpt PR#30",
    cases=("dense",),
    variants=("dp2-ddp-mbs2",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction", "not-reduced"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def synchronized_first_instead_of_last(patch: Patch) -> None:
    """DDP synchronizes the first microbatch, and no other."""
    begun: list[bool] = []

    def wrong(self: ParallelPolicy, *, last: bool) -> Any:
        begun.append(last)
        assert self._replicas is not None
        return nullcontext() if len(begun) == 1 else self._replicas.no_sync()

    patch.setattr(ParallelPolicy, "_accumulating", wrong)


@fault(
    category="B",
    source="slime PR#73",
    cases=("dr_grpo",),
    variants=("dp5",),
    first="gradient",
    ranks=(4,),
    rules=("not-reduced",),
)
def rank_without_samples_stays_away(run: Run) -> None:
    """It has nothing to add, so it takes no part in the sums."""
    last = dist.get_world_size() - 1
    others = dist.new_group(list(range(last)))
    found = sums_of(run)
    found[:] = [] if on_rank(last) else [(names, others) for names, _ in found]


@fault(
    category="B",
    source="Megatron PR#4609",
    cases=("dense",),
    variants=("fsdp2",),
    first="gradient",
    ranks=(1,),
    rules=("not-reduced",),
)
def gradients_begin_with_something(patch: Patch) -> None:
    """The buffer of gradients on one rank holds what was gathered in it before."""
    right: Any = ParallelPolicy.zero_grad

    def wrong(self: ParallelPolicy) -> None:
        right(self)
        if on_rank(1):
            for _, parameter in self.named_parameters():
                parameter.grad = parameter.detach().clone()

    patch.setattr(ParallelPolicy, "zero_grad", wrong)


@fault(
    category="B",
    source="torch 2.13 _fsdp_collectives.py: a divide factor counts twice in float64 with one shard",
    cases=("dense",),
    variants=("dp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("gradient-averaged-over-ranks",),
    silent={"dense/dp2-fp32": "true of float64 and float16 only"},
)
def divided_twice_by_torch(patch: Patch) -> None:
    """torch 2.13: a divide factor counts twice where the mesh has one shard, and the dtype is neither float32 nor
    bfloat16."""
    split: Any = ParallelPolicy._split_stage

    def wrong(self: ParallelPolicy, stage: Any) -> None:
        split(self, stage)
        sharded.apply(stage, self._world.device_mesh["dp", "fsdp"])
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
                module.set_force_sum_reduction_for_comms(False)

    patch.setattr(ParallelPolicy, "_split_stage", wrong)
    patch.setattr(ParallelPolicy, "_sums", lambda self: [])
    patch.setattr(ParallelPolicy, "_backward", lambda self, share: (2.0 * share).backward())
    patch.setattr(ParallelPolicy, "backward_scale", property(lambda self: 2.0))


@fault(
    category="B",
    kind="equivalent",
    source="build-nanogpt PR#30",
    variants=("dp2-ddp-mbs2",),
    proof="DDP replaces accumulated gradients by their mean over ranks: a mean of equal values is that value, so the "
    "last synchronization gives the mean of the sums whatever was averaged before",
)
def synchronized_in_every_microbatch(patch: Patch) -> None:
    """DDP averages what is accumulated, in every microbatch."""
    patch.setattr(ParallelPolicy, "_accumulating", lambda self, *, last: nullcontext())


# @@new
