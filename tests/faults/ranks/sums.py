"""Faults in the sums of gradients over ranks."""

from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from regress.engine.local_tensor import local
from regress.parallel import fsdp, gradient_reduction, parallel_policy
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import FORWARD_CHECKS, SCALE_BLIND_CHECKS, Shown, equivalent, fault, met_in
from tests.faults.ranks.helpers import HEAD_NORMS, on_rank, sums_of


@fault(
    "B",
    "gradient",
    "gradient-averaged-over-ranks",
    on="dense/dp2 dense/cp2",
    ranks=(0, 1),
    blind=SCALE_BLIND_CHECKS,
)
@met_in("TRL PR#3938")
@around(parallel_policy, "sum_gradients")
def averaged_over_ranks(right, parameters, groups):
    """Shares of the loss whose sum is the whole are averaged."""
    right(parameters, groups)
    for names, group in groups:
        for name in names:
            gradient = parameters[name].grad
            local(gradient).div_(group.size())


@fault(
    "B",
    "gradient",
    "gradient-averaged-over-ranks",
    on="dense/fsdp2",
    ranks=(0, 1),
    also=(Shown("dense", "dp2-fsdp2-hsdp-mbs3", "gradient", ranks=(0, 1, 2, 3)),),
)
@met_in("FSDP2: its own divide factor")
def averaged_over_shards(patch):
    """FSDP as it comes: it divides by the number of ranks."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
    patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


@fault("B", "token_gradient", "token-gradient-of-ranks", on="dense/dp2-ddp", ranks=(0, 1))
@met_in("TRL PR#3938")
@in_place_of(ParallelPolicy, "_backward")
def averaged_by_ddp(self, share):
    """DDP averages, and nobody multiplies."""
    return self._replicas.backward(share)


@fault("A", "token_gradient", "token-gradient-of-ranks", on="dense/dp2 dense/cp2", ranks=(0, 1))
@met_in("NeMo Automodel PR#3830")
@around(ParallelPolicy, "_backward")
def loss_times_ranks(right, self, share):
    """A factor against an average that nobody takes."""
    return right(self, share * dist.get_world_size())


# norms-not-summed: of tp2, where the norms of heads are all that must be summed
@fault(
    "D",
    "gradient",
    "reduction not-reduced norms-not-summed",
    on="dense/cp2",
    ranks=(0, 1),
    precisions="float64 float32",
    also=(
        Shown("dense", "dp2-fsdp2", "gradient", ranks=(0, 1, 2, 3)),
        Shown("dense", "tp2", "gradient", ranks=(0, 1), names=HEAD_NORMS),
    ),
    blind=FORWARD_CHECKS,
)
@met_in("VeOmni PR#1115")
def sums_left_out(run):
    """No gradient is summed over ranks after the backward pass."""
    sums_of(run).clear()


# gradient-averaged-over-ranks: it says that whole gradients are summed over the ranks, which they are
@fault(
    "C",
    "gradient",
    "gradient-power-of-two gradient-averaged-over-ranks",
    on="dense/tp2",
    names=HEAD_NORMS,
    ranks=(0, 1),
)
@met_in("torch.distributed.nn.functional.all_reduce sums again in its backward pass")
def summed_twice(run):
    """Once by a hook, and once more by the step."""
    found = sums_of(run)
    found += list(found)


@fault(
    "C",
    "gradient",
    "accumulation summed-in-every-microbatch",
    on="dense/tp2-mbs6",
    names=HEAD_NORMS,
    ranks=(0, 1),
    also=(Shown("tools", "dp2-packed-budget48", "gradient", ranks=(0, 1)),),
)
@met_in("transformers 5.23 ReplicatedWithGradAllReduce, picotron PR#5")
def summed_in_every_microbatch(run):
    """The gradients accumulated so far are summed after each backward pass: earlier ones again and again."""
    model = run.trainer.policy
    groups = [*sums_of(run)]
    sums_of(run).clear()
    right = model._backward

    def wrong(share):
        right(share)
        gradient_reduction.sum_gradients(dict(model.named_parameters()), groups)

    model._backward = wrong


@fault("B", "gradient", "reduction not-reduced", on="dense/dp2-ddp", ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("minimind#853")
def ddp_bypassed(run):
    """The model inside the wrapper is called, so that no hook is armed."""
    assert run.trainer.policy._callable is not run.trainer.policy.model
    run.trainer.policy._callable = run.trainer.policy.model


@fault("B", "gradient", "reduction not-reduced", on="dense/dp2-ddp-mbs2", ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("FunASR PR#3472, build-nanogpt PR#30")
def synchronized_first_instead_of_last(patch):
    """DDP synchronizes the first microbatch, and no other."""
    begun = []

    def wrong(self, *, last):
        begun.append(last)
        return nullcontext() if len(begun) == 1 else self._replicas.no_sync()

    patch.setattr(ParallelPolicy, "_accumulating", wrong)


@fault("B", "gradient", "not-reduced", on="dr_grpo/dp5", ranks=(4,))
@met_in("slime PR#73")
def rank_without_samples_stays_away(run):
    """It has nothing to add, so it takes no part in the sums."""
    last = dist.get_world_size() - 1
    others = dist.new_group(list(range(last)))
    found = sums_of(run)
    found[:] = [] if on_rank(last) else [(names, others) for names, _ in found]


@fault("B", "gradient", "not-reduced", on="dense/fsdp2", ranks=(1,))
@met_in("Megatron PR#4609")
@around(ParallelPolicy, "zero_grad")
def gradients_begin_with_something(right, self):
    """The buffer of gradients on one rank holds what was gathered in it before."""
    right(self)
    if on_rank(1):
        for _, parameter in self.named_parameters():
            parameter.grad = parameter.detach().clone()


@fault(
    "B",
    "gradient",
    "gradient-averaged-over-ranks",
    on="dense/dp2",
    ranks=(0, 1),
    silent={"dense/dp2-fp32": "true of float64 and float16 only"},
)
@met_in("torch 2.13 _fsdp_collectives.py: a divide factor counts twice in float64 with one shard")
def divided_twice_by_torch(patch):
    """torch 2.13: a divide factor counts twice where the mesh has one shard, and the dtype is neither float32 nor
    bfloat16."""

    def wrong(split, self, stage):
        split(self, stage)
        fsdp.apply(stage, self._world.device_mesh["dp", "fsdp"])
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
                module.set_force_sum_reduction_for_comms(False)

    patch.around(ParallelPolicy, "_split_stage", wrong)
    patch.setattr(ParallelPolicy, "_sums", lambda self: [])
    patch.setattr(ParallelPolicy, "_backward", lambda self, share: (2.0 * share).backward())
    patch.setattr(ParallelPolicy, "backward_scale", property(lambda self: 2.0))


@equivalent(
    "B",
    on="dense/dp2-ddp-mbs2",
    proof="DDP replaces accumulated gradients by their mean over ranks: a mean of equal values is that value, so the "
    "last synchronization gives the mean of the sums whatever was averaged before",
)
@met_in("build-nanogpt PR#30")
@in_place_of(ParallelPolicy, "_accumulating")
def synchronized_in_every_microbatch(self, *, last):
    """DDP averages what is accumulated, in every microbatch."""
    return nullcontext()
