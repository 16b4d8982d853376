"""Refactorings of exchanges among ranks, and of what a model reads and computes on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.reference import Reference
from regress.parallel import policy, ulysses
from regress.parallel.exchange import gather
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.patch import Patch

WIDE = ("float64", "float32")


@fault(
    category="F",
    kind="harmless",
    fresh=True,
    cases=("moe",),
    variants=("mbs4", "ep2"),
    precisions=WIDE,
)
def softmax_of_the_chosen_experts(run: Run) -> None:
    """Weights of experts are a softmax over the logits of the chosen ones, which normalizes by itself."""

    def other(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = out
        return logits, logits.gather(-1, chosen).softmax(-1).to(weights.dtype), chosen

    for module in modules_of(run, lambda one: getattr(one, "norm_topk_prob", False)):
        module.register_forward_hook(other)


@fault(
    category="G",
    kind="harmless",
    fresh=True,
    cases=("gpt2", "dense"),
    variants=("left-mbs3",),
    precisions=WIDE,
)
def padding_at_position_one(patch: Patch) -> None:
    """The model reads position 1 where nothing lies, as generate() of transformers fills it in."""
    right: Any = LocalPolicy._run

    def other(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        there = torch.from_numpy(micro.layout.attention_mask)
        ids = torch.where(there, micro.position_ids, 1)
        return right(self, model, replace(micro, position_ids=ids), *rest)

    patch.setattr(LocalPolicy, "_run", other)


@fault(
    category="B",
    kind="harmless",
    fresh=True,
    cases=("dense", "dr_grpo"),
    variants=("dp2", "dp5"),
    precisions=WIDE,
)
def gradients_summed_on_one_rank(patch: Patch) -> None:
    """Gradients are summed on one rank of a group, and sent to the others."""

    def other(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        for names, group in groups:
            first = dist.get_global_rank(group, 0)
            for name in names:
                parameter = parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local(parameter.grad)
                total = own.contiguous().clone()
                dist.reduce(total, first, group=group)
                dist.broadcast(total, first, group=group)
                own.copy_(total)

    patch.setattr(policy, "sum_gradients", other)


@fault(
    category="D",
    kind="harmless",
    fresh=True,
    cases=("dense", "gspo"),
    variants=("cp2",),
    precisions=WIDE,
)
def heads_gathered_and_picked(patch: Patch) -> None:
    """Every rank gathers what all ranks would send to all, and picks its own part."""

    def other(parts: Tensor, group: Any) -> Tensor:
        return gather(parts, len(parts), group)[:, dist.get_rank(group)]

    patch.setattr(ulysses, "swap", other)


@fault(category="T", kind="harmless", fresh=True, variants=("mbs4", "packed-mbs3"), precisions=WIDE)
def heads_projected_one_by_one(run: Run) -> None:
    """The projection behind attention is a sum of one product for each head."""

    def forward(self: Any, heads: int, x: Tensor) -> Tensor:
        parts = zip(x.chunk(heads, dim=-1), self.weight.chunk(heads, dim=1), strict=True)
        products = [part @ weight.T for part, weight in parts]
        return sum(products[1:], products[0])

    for module in modules_of(run, lambda one: hasattr(one, "o_proj")):
        count = module.config.num_attention_heads
        module.o_proj.forward = functools.partial(forward, module.o_proj, count)


@fault(
    category="J",
    kind="harmless",
    fresh=True,
    cases=("dense", "tied"),
    variants=("mbs4", "fsdp2"),
    precisions=WIDE,
)
def reference_one_microbatch_at_a_time(patch: Patch) -> None:
    """The reference is asked for the log-probs of one microbatch after the other."""
    right: Any = Reference.log_probs

    def other(self: Reference, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return [values for micro in microbatches for values in right(self, [micro])]

    patch.setattr(Reference, "log_probs", other)
