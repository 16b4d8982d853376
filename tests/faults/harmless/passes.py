"""Refactorings of passes, sums over ranks, adapters and the log-probs that are made at their end."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine import policy as local_policy
from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.sampling import LogProbRecorder
from regress.grpo.logprobs import TokenLogProbs, token_log_probs
from regress.parallel import policy
from regress.parallel.pipeline import Pipeline
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.patch import Patch

WIDE = ("float64", "float32")


@fault(category="B", kind="harmless", fresh=True, variants=("dp2", "tp2-sp"), precisions=WIDE)
def gradients_summed_in_halves(patch: Patch) -> None:
    """Each gradient is summed over ranks in two halves, its second one first."""

    def other(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        for names, group in groups:
            for name in names:
                parameter = parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local(parameter.grad)
                flat = own.reshape(-1).clone()
                middle = flat.numel() // 2
                for half in (flat[middle:], flat[:middle]):
                    if half.numel():
                        dist.all_reduce(half, group=group)
                own.copy_(flat.view_as(own))

    patch.setattr(policy, "sum_gradients", other)


@fault(
    category="D",
    kind="harmless",
    fresh=True,
    cases=("dense", "gpt2"),
    variants=("cp2-ring-packed", "cp4-ring-zigzag"),
    precisions=WIDE,
)
def blocks_that_nobody_sees_computed(patch: Patch) -> None:
    """The ring computes blocks of keys that no query of the rank sees, too; their weights are 0."""

    def other(self: ContextSegments) -> tuple[Tensor, ...]:
        return tuple(self.local_mask.chunk(self.ranks, dim=3))

    patch.setattr(ContextSegments, "blocks", property(other))


@fault(
    category="E",
    kind="harmless",
    fresh=True,
    cases=("tied",),
    variants=("pp2-mbs4", "tp2-pp2-mbs4"),
    precisions=WIDE,
)
def microbatches_relayed_one_by_one(patch: Patch) -> None:
    """In passes without a backward pass a microbatch enters the first stage when the one before has left the last."""
    right: Any = Pipeline.values

    def other(self: Pipeline, microbatches: Sequence[Microbatch], project: Any) -> list[TokenLogProbs]:
        return [values for micro in microbatches for values in right(self, [micro], project)]

    patch.setattr(Pipeline, "values", other)


@fault(
    category="S",
    kind="harmless",
    fresh=True,
    cases=("lora",),
    variants=("mbs4", "packed-mbs3"),
    precisions=WIDE,
)
def factors_by_einsum(run: Run) -> None:
    """Products with the factors of adapters are Einstein sums."""

    def forward(factor: Any, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, factor.weight)

    for layer in modules_of(run, lambda one: hasattr(one, "lora_A") and hasattr(one, "scaling")):
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            factor.forward = functools.partial(forward, factor)


@fault(
    category="H",
    kind="harmless",
    fresh=True,
    cases=("dense", "dr_grpo"),
    variants=("mbs4", "packed-chunked-mbs4"),
    precisions=WIDE,
)
def log_probs_from_the_last_row(patch: Patch) -> None:
    """Rows of logits are taken in the reverse order, and what is made of them is turned round again."""
    right: Any = token_log_probs

    def other(logits: Tensor, targets: Tensor, **rest: Any) -> TokenLogProbs:
        found: TokenLogProbs = right(logits.flip(0), targets.flip(0), **rest)
        entropy = None if found.entropy is None else found.entropy.flip(0)
        return replace(found, log_probs=found.log_probs.flip(0), entropy=entropy)

    patch.setattr(local_policy, "token_log_probs", other)


@fault(category="V", kind="harmless", fresh=True, cases=("rollout",), variants=("base", "rollout-dp2-batch5"))
def log_probs_of_the_sampler_by_logsumexp(patch: Patch) -> None:
    """The sampler's log-prob of a token is its score less the log-sum-exp of all."""

    def other(self: Any, drawn: Tensor) -> None:
        if self._last is None:
            return
        wide = self._last if self._last.dtype == torch.float64 else self._last.float()
        self._columns.append(wide.gather(1, drawn[:, None]).squeeze(1) - wide.logsumexp(-1))
        self._last = None

    patch.setattr(LogProbRecorder, "_settle", other)
