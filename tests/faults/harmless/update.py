"""Refactorings of backward passes, clipping, optimizer and sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine import optim
from regress.engine.attention import visible
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.parallel import expert, policy, ring, sequence, vocabulary
from regress.parallel.pipeline import Pipeline
from regress.parallel.segments import ContextSegments
from regress.parallel.world import ProcessWorld
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.update import after_each_backward

EVERY = ("float64", "float32", "bfloat16")


@fault(category="L", kind="harmless", cases=("dense", "tied"), precisions=EVERY)
def norm_of_all_in_one(patch: Patch) -> None:
    """The norm is that of one long vector."""

    def other(self: LocalPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        grads = [p.grad.flatten() for _, p in self.named_parameters() if p.grad is not None]
        return torch.linalg.vector_norm(torch.cat(grads), dtype=self.log_prob_dtype)

    patch.setattr(LocalPolicy, "_total_norm", other)


@fault(category="L", kind="harmless", cases=("dense", "tied"), precisions=EVERY)
def norm_by_squares(patch: Patch) -> None:
    """The norm is the root of a sum of squares, in float64."""

    def other(self: LocalPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        total = torch.stack([norm.double().square() for norm in norms.values()]).sum()
        return total.sqrt().to(self.log_prob_dtype)

    patch.setattr(LocalPolicy, "_total_norm", other)


@fault(category="L", kind="harmless", cases=("dense",), precisions=EVERY)
def clipped_by_division(patch: Patch) -> None:
    """Gradients are divided by what is too much of their norm."""
    right: Any = LocalPolicy.clip_grad_norm

    def other(self: LocalPolicy, limit: float | None) -> Tensor:
        norm = right(self, None)
        if limit is not None and norm + 1e-6 > limit:
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.div_((norm + 1e-6) / limit)
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", other)


@fault(category="B", kind="harmless", precisions=EVERY)
def gradients_in_a_buffer_of_their_own(patch: Patch) -> None:
    """Gradients of each microbatch are moved to a buffer, and back after the last."""
    buffer: dict[int, Tensor] = {}

    def move(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                known = buffer.get(id(parameter))
                buffer[id(parameter)] = parameter.grad if known is None else known + parameter.grad
                parameter.grad = buffer[id(parameter)] if last else None
        if last:
            buffer.clear()

    after_each_backward(patch, move)


@fault(category="R", kind="harmless", precisions=EVERY)
def loss_scaled_and_unscaled(patch: Patch) -> None:
    """Each share enters the backward pass times 1024, and gradients are divided by it, both exactly."""
    right: Any = LocalPolicy._backward
    clip: Any = LocalPolicy.forward_backward

    def other(self: LocalPolicy, micros: Any, loss: Any) -> Any:
        results = clip(self, micros, loss)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= 1024
        return results

    patch.setattr(LocalPolicy, "backward_scale", property(lambda self: 1024.0))
    patch.setattr(LocalPolicy, "_backward", lambda self, share: right(self, share * 1024))
    patch.setattr(LocalPolicy, "forward_backward", other)


@fault(category="M", kind="harmless", cases=("dense", "gpt2"), precisions=("float64", "float32"))
def adam_by_hand(patch: Patch) -> None:
    """AdamW as its paper writes it (arXiv 1711.05101)."""

    @torch.no_grad()
    def other(optimizer: torch.optim.Optimizer) -> None:
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

    patch.setattr(optim, "update", other)


@fault(category="M", kind="harmless", cases=("dense", "gpt2"), precisions=("float64", "float32"))
def one_update_for_each_parameter(patch: Patch) -> None:
    """The optimizer steps once for each parameter, alone in its group."""

    def other(optimizer: torch.optim.Optimizer) -> None:
        groups = list(optimizer.param_groups)
        (group,) = groups
        params, names = group["params"], group["param_names"]
        for parameter, name in zip(params, names, strict=True):
            group["params"], group["param_names"] = [parameter], [name]
            optimizer.step()
        group["params"], group["param_names"] = params, names

    patch.setattr(optim, "update", other)


# sums over ranks


@fault(category="B", kind="harmless", variants=("dp2", "tp2-sp"), precisions=("float64", "float32"))
def gradients_summed_one_by_one(patch: Patch) -> None:
    """A collective for each gradient."""

    def other(parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], Any]]) -> None:
        for names, group in groups:
            for name in names:
                parameter = parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local(parameter.grad)
                whole = own.contiguous()
                dist.all_reduce(whole, group=group)
                own.copy_(whole)

    patch.setattr(policy, "sum_gradients", other)


@fault(category="B", kind="harmless", variants=("dp2", "dp4-packed-mbs2"), precisions=("float64", "float32"))
def gradients_gathered_and_added(patch: Patch) -> None:
    """Gradients of all ranks are gathered, and added from the last rank to the first."""

    def other(parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], Any]]) -> None:
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

    patch.setattr(policy, "sum_gradients", other)


@fault(
    category="C", kind="harmless", variants=("tp2", "tp2-packed-chunk7"), precisions=("float64", "float32")
)
def parts_of_the_vocabulary_gathered(patch: Patch) -> None:
    """Maxima and sums of all parts of the vocabulary are gathered and merged on every rank."""

    def gathered(tensor: Tensor, group: ProcessGroup) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    def other(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        if not maximum.numel():
            return maximum, sums
        maxima, all_sums = gathered(maximum, group), gathered(sums, group)
        highest = maxima.amax(0)
        shift = maxima - highest
        total, moment, target, holders = all_sums.unbind(1)
        scaled = [total * shift.exp(), (moment + shift * total) * shift.exp(), target, holders]
        return highest, torch.stack([part.sum(0) for part in scaled])

    patch.setattr(vocabulary, "_joined", other)


@fault(category="C", kind="harmless", variants=("tp2-sp",), precisions=("float64", "float32"))
def columns_cut_by_index(patch: Patch) -> None:
    """Columns of the sequence are taken by their indices."""

    def other(whole: Tensor, group: ProcessGroup) -> Tensor:
        width = whole.shape[1] // group.size()
        return whole.index_select(1, torch.arange(group.rank() * width, (group.rank() + 1) * width))

    patch.setattr(sequence, "_own_columns", other)


@fault(
    category="D",
    kind="harmless",
    variants=("cp2-gather", "cp2-ring-packed"),
    precisions=("float64", "float32"),
)
def masks_of_whole_rows(patch: Patch) -> None:
    """The mask of a rank's queries is cut out of that of all."""

    def other(self: ContextSegments) -> Tensor:
        width = self.table.shape[1]
        rows = visible(self.whole, self.table.flatten(), self.table.flatten())
        return rows[:, :, self.rank * width : (self.rank + 1) * width]

    patch.setattr(ContextSegments, "local_mask", property(other))


@fault(
    category="D",
    kind="harmless",
    variants=("cp2-ring-packed", "cp2-zigzag-packed-mbs4"),
    precisions=("float64", "float32"),
)
def factor_of_the_ring_by_powers(patch: Patch) -> None:
    """The factor that makes partial sums comparable is a power of two."""
    patch.setattr(
        ring, "_kept", lambda maximum, raised: torch.exp2((maximum - raised) * (1.0 / math.log(2.0)))
    )


@fault(
    category="E",
    kind="harmless",
    cases=("tied",),
    variants=("pp2", "pp2-mbs4"),
    precisions=("float64", "float32"),
)
def tied_gradients_in_one_order(patch: Patch) -> None:
    """Both stages add the gradient of the first to that of the last, in this order."""
    right: Any = Pipeline._other

    def other(self: Pipeline) -> None:
        first, last, own = self._ranks[0], self._ranks[-1], self.group.rank()
        if first == last or own not in (first, last):
            return
        for name, parameter in self.stages.named_parameters():
            if name in self.stages.tied and parameter.grad is not None:
                mine = local(parameter.grad)
                others = right(self, mine, last if own == first else first)
                mine.copy_(mine + others if own == last else others + mine)

    patch.setattr(Pipeline, "sum_tied", other)


@fault(category="F", kind="harmless", cases=("moe",), variants=("ep2", "ep4-packed"), precisions=("float64",))
def experts_run_one_by_one(patch: Patch) -> None:
    """A rank runs its experts one after the other, each on its own rows."""
    right: Any = expert._run

    def other(module: nn.Module, rows: Tensor, experts: Tensor) -> Tensor:
        if not len(rows):
            return right(module, rows, experts)
        out = torch.zeros_like(rows)
        for number in experts.unique():
            here = (experts == number).nonzero()[:, 0]
            out = out.index_copy(0, here, right(module, rows[here], experts[here]))
        return out

    patch.setattr(expert, "_run", other)


@fault(category="H", kind="harmless", variants=("dp2", "dp4-packed-mbs2"), precisions=("float64", "float32"))
def log_probs_summed_by_gathering(patch: Patch) -> None:
    """Recorded log-probs of all ranks are gathered and added."""
    right: Any = ProcessWorld.sum

    def other(self: ProcessWorld, values: Tensor) -> Tensor:
        parts = self.gather(
            values if self.plan.mesh.coordinates(self.rank)["tp"] == 0 else torch.zeros_like(values)
        )
        return torch.stack(parts).sum(0)

    assert right
    patch.setattr(ProcessWorld, "sum", other)
