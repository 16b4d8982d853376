"""Faults of data parallelism: sums, means and buffers of gradients."""

from unittest import mock

import torch
import torch.distributed as dist

from regress.engine.local_tensor import local
from regress.parallel import fsdp, gradient_reduction
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel import parallel_policy as policy
from regress.parallel.gradient_reduction import sum_gradients
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import EMBEDDED, before_the_second_backward_pass, on_rank, sums_of


# names the sum over ranks
# names a sum taken twice
# names a sum that is taken twice
@fault(
    "B",
    "gradient",
    "gradient-of-one-layer gradient-averaged-over-ranks gradient-power-of-two gradient-scale gradients",
    on="tools/dp2-packed-budget48",
    names=r"model\.layers\.1\..*",
)
@met_in("a layer that two buckets of an overlapped all-reduce hold")
def last_layer_in_two_buckets(run):
    """Gradients of the last layer are summed over ranks, and the sums once more."""
    found = sums_of(run)
    found += [([name for name in names if ".layers.1." in name], group) for names, group in found]


@fault(
    "B",
    "gradient",
    "gradient-averaged-over-ranks gradient-power-of-two gradient-scale gradients",
    on="dense/fsdp2-noreshard-packed-budget64",
    names=r"model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight",
)
@met_in("FSDP2: set_gradient_divide_factor is not recursive")
@around(fsdp, "apply")
def parameters_outside_of_blocks_averaged(right, model, mesh, **rest):
    """Gradients of blocks are summed over shards, and those of all other parameters are averaged."""
    right(model, mesh, **rest)
    model.set_gradient_divide_factor(float(mesh.size()))


@fault(
    "B",
    "gradient",
    "accumulation samples-in-the-gradient backward-or-accumulation gradients",
    on="dense/dp4-packed-mbs2",
)
@met_in("Fast-LLM#550: a buffer that a rank resets when it gets a new microbatch")
@by(before_the_second_backward_pass)
def first_microbatch_of_a_rank_wiped(policy, _):
    """One rank drops the gradients of its first microbatch before its second one."""
    return policy.zero_grad()


EMBEDDINGS = "model.embed_tokens.weight"


# names a part of the gradient that is not added
# names a sum that is left out
@fault(
    "B",
    f"gradient {EMBEDDINGS}",
    "gradient-of-one-tensor reduction gradients inputs-hold",
    on="dense/dp4-packed-mbs2",
    names=EMBEDDED,
)
@met_in("sparse gradients of embeddings, of which a rank takes the rows that it has sent")
@in_place_of(parallel_policy, "sum_gradients")
def rows_of_own_tokens_alone_received(parameters, groups):
    """A rank has no gradient for the embeddings of tokens that its own samples lack, and other samples have."""
    grad = parameters[EMBEDDINGS].grad
    touched = local(grad).ne(0).any(1, keepdim=True)
    sum_gradients(parameters, groups)
    local(grad).mul_(touched)


@fault(
    "B", "gradient", "gradient-dtype precision gradients inputs-hold", kind="precision", on="dense/dp2-ddp"
)
@met_in("torch: DistributedDataParallel with bf16_compress_hook")
def buckets_compressed_by_ddp(run):
    """DDP sends its buckets of gradients in half precision."""

    module = vars(run.trainer.policy)["_replicas"].module

    def compressed(bucket):
        group = module.process_group
        own = rounded(bucket.buffer() / group.size())
        work = dist.all_reduce(own, group=group, async_op=True)
        return work.get_future().then(lambda done: rounded(done.value()[0]))

    # torch reads the annotations of a hook, which a lambda has not
    module.register_comm_hook(None, lambda _, bucket: compressed(bucket))


@fault("B", "gradient", "gradient-scale", on="dr_grpo/dp5", ranks=(0, 1, 2, 3, 4))
@met_in("a mean over all ranks that is undone by the ranks that had samples")
@around(parallel_policy, "sum_gradients")
def averaged_over_ranks_and_scaled_for_those_with_samples(right, parameters, groups):
    """Gradients are averaged over five ranks, and multiplied by the four that have samples."""
    for names, group in groups:
        own = [parameters[name].grad for name in names]
        some = any(bool(local(grad).any()) for grad in own if grad is not None)
        active = torch.tensor(float(some))
        dist.all_reduce(active, group=group)
        right(parameters, [(names, group)])
        for name in names:
            grad = parameters[name].grad
            local(grad).mul_(float(active) / group.size())


# accepted after the first run: names the sum over ranks, of which token gradients leave no doubt
@fault("B", "gradient", "backward-or-accumulation gradients", on="dapo/dp2", ranks=(0, 1), update=1)
@met_in("Megatron PR#4609: a buffer that is sent before this update's gradient is in it")
def gradient_of_a_rank_one_update_late(patch):
    """One rank enters the sum with its gradient of the update before, from the second update on."""
    kept = {}

    def wrong(right, parameters, groups):
        known = list(groups)
        if on_rank(1):
            own = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            for name, late in kept.items():
                parameters[name].grad = late
            kept.update(own)
        right(parameters, known)

    patch.around(parallel_policy, "sum_gradients", wrong)


@fault("B", "gradient", "reduction not-reduced", on="dense/dp2-fsdp2-hsdp-mbs3", blind=FORWARD_CHECKS)
@met_in("Megatron PR#3693: several instances of a distributed optimizer")
@around(fsdp, "apply")
def replicas_of_shards_not_summed(right, model, mesh, **rest):
    """Gradients are summed over shards, and not over the groups of ranks that hold the same shards."""
    right(model, mesh["fsdp"] if mesh.ndim > 1 else mesh, **rest)


# the factor is the number of ranks, on the rank that is named
@fault(
    "B",
    "token_gradient",
    "token-gradient-scale token-gradient-power-of-two token-gradient-denominators token-gradient-of-ranks",
    on="gpt2/dp2-left-mbs5",
    ranks=(1,),
    blind=FORWARD_CHECKS,
)
@met_in("lerobot#3668, minimind#853: a rank that goes another way")
@around(policy.ParallelPolicy, "_backward")
def last_rank_enters_with_half_its_loss(right, self, share):
    """The last rank divides its loss by two on its way into the backward pass, and the others do not."""
    right(self, share / 2 if dist.get_rank() == dist.get_world_size() - 1 else share)


@fault("B", "gradient", "reduction not-reduced", on="tools/dp2-packed-budget48", ranks=(0, 1))
@met_in("FunASR PR#3472, DeepSpeed PR#7985")
def last_microbatch_not_summed(patch):
    """Gradients are summed over ranks before the last microbatch, whose own part stays on its rank."""
    backward = ParallelPolicy._backward

    def wrong(right, self, micros, loss):
        groups, left = list(self._summed), [len(micros)]

        def and_sum(own, share):
            left[0] -= 1
            if left[0] == 0:
                gradient_reduction.sum_gradients(dict(own.named_parameters()), groups)
            backward(own, share)

        self._summed.clear()
        with mock.patch.object(ParallelPolicy, "_backward", and_sum):
            results = right(self, micros, loss)
        self._summed.extend(groups)
        return results

    patch.around(ParallelPolicy, "forward_backward", wrong)
