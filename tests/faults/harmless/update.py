"""Refactorings of backward passes, clipping, optimizer and sums over ranks."""

import math

import torch
import torch.distributed as dist

from regress.engine import optimizer as optim
from regress.engine.attention import visible
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.local_tensor import local
from regress.parallel import expert_parallel, ring_attention, sequence_parallel, vocabulary_log_probs
from regress.parallel import parallel_policy as policy
from regress.parallel.context_columns import ContextSegments
from regress.parallel.distributed_ranks import ProcessWorld
from regress.parallel.pipeline_parallel import Pipeline
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.update_probes import after_each_backward
from tests.faults.fault import harmless

EVERY = ("float64", "float32", "bfloat16")


@harmless("L", on="dense/mbs4 tied/mbs4", precisions="float64 float32 bfloat16")
@in_place_of(LocalPolicy, "_total_norm")
def norm_of_all_in_one(self, norms):
    """The norm is that of one long vector."""
    grads = [p.grad.flatten() for _, p in self.named_parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(grads), dtype=self.log_prob_dtype)


@harmless("L", on="dense/mbs4 tied/mbs4", precisions="float64 float32 bfloat16")
@in_place_of(LocalPolicy, "_total_norm")
def norm_by_squares(self, norms):
    """The norm is the root of a sum of squares, in float64."""
    total = torch.stack([norm.double().square() for norm in norms.values()]).sum()
    return total.sqrt().to(self.log_prob_dtype)


@harmless("L", precisions="float64 float32 bfloat16")
@around(LocalPolicy, "clip_grad_norm")
def clipped_by_division(right, self, limit):
    """Gradients are divided by what is too much of their norm."""
    norm = right(self, None)
    if limit is not None and norm + 1e-6 > limit:
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.div_((norm + 1e-6) / limit)
    return norm


@harmless("B", precisions="float64 float32 bfloat16")
def gradients_in_a_buffer_of_their_own(patch):
    """Gradients of each microbatch are moved to a buffer, and back after the last."""
    buffer = {}

    def move(policy, last):
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                known = buffer.get(id(parameter))
                buffer[id(parameter)] = parameter.grad if known is None else known + parameter.grad
                parameter.grad = buffer[id(parameter)] if last else None
        if last:
            buffer.clear()

    after_each_backward(patch, move)


@harmless("R", precisions="float64 float32 bfloat16")
def loss_scaled_and_unscaled(patch):
    """Each share enters the backward pass times 1024, and gradients are divided by it, both exactly."""

    def other(clip, self, micros, loss):
        results = clip(self, micros, loss)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= 1024
        return results

    patch.setattr(LocalPolicy, "backward_scale", property(lambda self: 1024.0))
    patch.around(LocalPolicy, "_backward", lambda right, self, share: right(self, share * 1024))
    patch.around(LocalPolicy, "forward_backward", other)


@harmless("M", on="dense/mbs4 gpt2/mbs4", precisions="float64 float32")
@in_place_of(optim, "update")
@torch.no_grad()
def adam_by_hand(optimizer):
    """AdamW as its paper writes it (arXiv 1711.05101)."""
    for group in optimizer.param_groups:
        (beta1, beta2), rate = group["betas"], group["lr"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] += 1
            number = float(state["step"])
            parameter -= rate * group["weight_decay"] * parameter
            state["exp_avg"].copy_(beta1 * state["exp_avg"] + (1 - beta1) * parameter.grad)
            state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"] + (1 - beta2) * parameter.grad**2)
            mean = state["exp_avg"] / (1 - beta1**number)
            root = (state["exp_avg_sq"] / (1 - beta2**number)).sqrt()
            parameter -= rate * mean / (root + group["eps"])
    vars(optimizer)["_opt_called"] = True  # or the schedule believes that the update was forgotten


@harmless("M", on="dense/mbs4 gpt2/mbs4", precisions="float64 float32")
@in_place_of(optim, "update")
def one_update_for_each_parameter(optimizer):
    """The optimizer steps once for each parameter, alone in its group."""
    groups = list(optimizer.param_groups)
    (group,) = groups
    params, names = group["params"], group["param_names"]
    for parameter, name in zip(params, names, strict=True):
        group["params"], group["param_names"] = [parameter], [name]
        optimizer.step()
    group["params"], group["param_names"] = params, names


# sums over ranks


@harmless("B", on="dense/dp2 dense/tp2-sp", precisions="float64 float32")
@in_place_of(policy, "sum_gradients")
def gradients_summed_one_by_one(parameters, groups):
    """A collective for each gradient."""
    for names, group in groups:
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            whole = own.contiguous()
            dist.all_reduce(whole, group=group)
            own.copy_(whole)


@harmless("B", on="dense/dp2 dense/dp4-packed-mbs2", precisions="float64 float32")
@in_place_of(policy, "sum_gradients")
def gradients_gathered_and_added(parameters, groups):
    """Gradients of all ranks are gathered, and added from the last rank to the first."""
    for names, group in groups:
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            parts = [
                torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())
            ]
            dist.all_gather(parts, own.contiguous(), group=group)
            own.copy_(sum(reversed(parts[:-1]), parts[-1]))


@harmless("C", on="dense/tp2 dense/tp2-packed-chunk7", precisions="float64 float32")
def parts_of_the_vocabulary_gathered(patch):
    """Maxima and sums of all parts of the vocabulary are gathered and merged on every rank."""

    def gathered(tensor, group):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    def other(maximum, sums, group):
        if not maximum.numel():
            return maximum, sums
        maxima, all_sums = gathered(maximum, group), gathered(sums, group)
        highest = maxima.amax(0)
        shift = maxima - highest
        total, moment, target, holders = all_sums.unbind(1)
        scaled = [total * shift.exp(), (moment + shift * total) * shift.exp(), target, holders]
        return highest, torch.stack([part.sum(0) for part in scaled])

    patch.setattr(vocabulary_log_probs, "_joined", other)


@harmless("C", on="dense/tp2-sp", precisions="float64 float32")
@in_place_of(sequence_parallel, "_own_columns")
def columns_cut_by_index(whole, group):
    """Columns of the sequence are taken by their indices."""
    width = whole.shape[1] // group.size()
    return whole.index_select(1, torch.arange(group.rank() * width, (group.rank() + 1) * width))


@harmless("D", on="dense/cp2-gather dense/cp2-ring-packed", precisions="float64 float32")
def masks_of_whole_rows(patch):
    """The mask of a rank's queries is cut out of that of all."""

    def other(self):
        width = self.table.shape[1]
        rows = visible(self.whole, self.table.flatten(), self.table.flatten())
        return rows[:, :, self.rank * width : (self.rank + 1) * width]

    patch.setattr(ContextSegments, "local_mask", property(other))


@harmless("D", on="dense/cp2-ring-packed dense/cp2-zigzag-packed-mbs4", precisions="float64 float32")
@in_place_of(ring_attention, "_kept")
def factor_of_the_ring_by_powers(maximum, raised):
    """The factor that makes partial sums comparable is a power of two."""
    return torch.exp2((maximum - raised) * (1.0 / math.log(2.0)))


@harmless("E", on="tied/pp2 tied/pp2-mbs4", precisions="float64 float32")
def tied_gradients_in_one_order(patch):
    """Both stages add the gradient of the first to that of the last, in this order."""
    right = Pipeline._other

    def other(self):
        first, last, own = self._ranks[0], self._ranks[-1], self.group.rank()
        if first == last or own not in (first, last):
            return
        for name, parameter in self.stages.named_parameters():
            if name in self.stages.tied and parameter.grad is not None:
                mine = local(parameter.grad)
                others = right(self, mine, last if own == first else first)
                mine.copy_(mine + others if own == last else others + mine)

    patch.setattr(Pipeline, "sum_tied", other)


@harmless("F", on="moe/ep2 moe/ep4-packed", precisions="float64")
@around(expert_parallel, "_run")
def experts_run_one_by_one(right, module, rows, experts):
    """A rank runs its experts one after the other, each on its own rows."""
    if not len(rows):
        return right(module, rows, experts)
    out = torch.zeros_like(rows)
    for number in experts.unique():
        here = (experts == number).nonzero()[:, 0]
        out = out.index_copy(0, here, right(module, rows[here], experts[here]))
    return out


@harmless("H", on="dense/dp2 dense/dp4-packed-mbs2", precisions="float64 float32")
def log_probs_summed_by_gathering(patch):
    """Recorded log-probs of all ranks are gathered and added."""
    right = ProcessWorld.sum

    def other(self, values):
        parts = self.gather(
            values if self.plan.mesh.coordinates(self.rank)["tp"] == 0 else torch.zeros_like(values)
        )
        return torch.stack(parts).sum(0)

    assert right
    patch.setattr(ProcessWorld, "sum", other)
