"""Faults of data parallelism: samples, denominators, replicas."""

from dataclasses import replace

import torch
import torch.distributed as dist

from regress.engine import grpo_trainer
from regress.engine.grpo_trainer import Trainer
from regress.engine.local_tensor import local
from regress.engine.mini_batch import TokenBatch
from regress.parallel.distributed_ranks import ProcessWorld
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import Shown, fault, met_in
from tests.faults.ranks.helpers import on_rank


@fault(
    "N",
    "coverage",
    "batch-left-out batch-twice",
    on="dense/dp2",
    ranks=(),
    status="coverage",
    says="was produced by no microbatch",
)
@met_in("TRL PR#2824, Megatron PR#5983")
@around(TokenBatch, "microbatches")
def same_samples_on_every_rank(right, self, plan, ranks, _):
    """All ranks read the first one's samples."""
    return right(self, plan, ranks, 0)


@fault(
    "N",
    "coverage",
    "batch-left-out",
    on="tools/dp2-packed-budget48",
    ranks=(),
    status="coverage",
    says="was produced by no microbatch",
)
@met_in("prime-rl PR#1035, verl PR#5725")
@around(TokenBatch, "microbatches")
def incomplete_microbatch_dropped(right, *args):
    """The samples that fill no whole microbatch are left out, on every rank."""
    return right(*args)[:-1]


# weights-world-size: the rank without tokens leaves the other its own count over the number of ranks
@fault(
    "A",
    "weights",
    "mean-of-means weights-world-size",
    on="dapo/dp2-dealt",
    ranks=(0, 1),
    update=0,
    also=(Shown("dapo", "dp2", "weights", ranks=(1,), update=0),),
)
@met_in("prime-rl PR#2359, TRL PR#3231")
@around(Trainer, "_laid_out")
def denominator_of_own_rank(right, self, *args):
    """Each rank divides by its own tokens, and the ranks are averaged."""
    found = right(self, *args)
    own = max(sum(len(micro.select) for micro in found.microbatches), 1)
    weights = found.tokens.weights * len(found.tokens) / (own * dist.get_world_size())
    return replace(found, tokens=replace(found.tokens, weights=weights))


@fault("I", "advantages", "advantage-of-a-rank advantage-groups", on="dense/dp2-dealt", ranks=(0, 1))
@met_in("AReaL#1419, slime#2230")
@around(grpo_trainer, "token_advantages")
def advantages_of_own_samples(right, rewards, groups, *args):
    """A group whose samples lie on several ranks is compared on each of them with its own part."""
    ranks = dist.get_world_size()
    return right(rewards, groups * ranks + torch.arange(len(groups)) % ranks, *args)


@fault("C", "ref_log_probs", "reference", on="dense/tp2", ranks=(0, 1))
@met_in("Megatron#7452 finding 10")
@in_place_of(ProcessWorld, "sum")
def log_probs_summed_over_all_ranks(self, values):
    """Ranks that hold the same tokens are summed, too."""
    dist.all_reduce(values)
    return values


@fault("C", "activations", "weights-of-a-rank", on="dense/dp2", ranks=(1,))
@met_in("NeMo Automodel PR#3822")
def other_weights_on_a_rank(run):
    """The initial weights were not broadcast."""
    if on_rank(1):
        for _, parameter in run.trainer.policy.named_parameters():
            local(parameter.data).mul_(1.01)


@fault(
    "C",
    "replicas",
    "replicas-drift",
    on="dense/tp2",
    names=r"activations/model\.norm|param/model\.norm\.weight",
    ranks=(),
    says="of rank 1 microbatch 0 differs from that of rank 0",
)
@met_in("BLOOM-176B, DeepSpeed#1801")
def last_bit_on_a_rank(run):
    """A replicated weight drifts apart, by a rounding error so far."""
    if on_rank(1):
        weight = dict(run.trainer.policy.named_parameters())["model.norm.weight"].data
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
