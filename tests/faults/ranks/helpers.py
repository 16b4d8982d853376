"""Helpers of faults of several ranks."""

import torch
import torch.distributed as dist

from regress.engine.local_tensor import local
from regress.parallel.parallel_policy import ParallelPolicy


class DividedGradient(torch.autograd.Function):
    """Passes a tensor on, and its gradient back divided by a number."""

    @staticmethod
    def forward(ctx, tensor, count):
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.count, None


def before_the_second_backward_pass(patch, change):
    """Call a function with the policy and the loss before rank 1 takes its second microbatch back."""
    passes_of = ParallelPolicy.forward_backward
    right = ParallelPolicy._backward
    made = [0]

    def begun(self, *args):
        made[0] = 0
        return passes_of(self, *args)

    def wrong(self, share):
        made[0] += 1
        if made[0] == 2 and on_rank(1):
            change(self, share)
        right(self, share)

    patch.setattr(ParallelPolicy, "forward_backward", begun)
    patch.setattr(ParallelPolicy, "_backward", wrong)


def on_rank(number):
    return dist.get_rank() == number


def of_others(value):
    """The value of every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sums_of(run):
    """Return the groups of gradients that the policy sums over ranks, as a list that may be changed."""
    model = run.trainer.policy
    assert model._summed
    return model._summed


def without(run, *parts):
    """Leave the parameters whose names have one of these parts out of all sums of gradients."""
    found = sums_of(run)
    kept = [([n for n in names if not any(p in n for p in parts)], group) for names, group in found]
    assert [len(names) for names, _ in kept] != [len(names) for names, _ in found]
    found[:] = [(names, group) for names, group in kept if names]


def exchanged(tensors):
    """Give each of two ranks the other's tensors, where they fit."""
    found = of_others({name: local(tensor).detach().clone() for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        other = found[1 - dist.get_rank()][name]
        if other.shape == local(tensor).shape:
            local(tensor.detach()).copy_(other)


AFTER_ATTENTION = r"model\.layers\..|model\.norm|lm_head"
"""Activations of all that comes after the first attention."""
HEAD_NORMS = r".*\.[qk]_norm\.weight"
EXPERTS = r".*\.experts\..*"
MOMENTS = r".*/exp_avg(_sq)?"
EMBEDDED = r"model\.embed_tokens\.weight"
