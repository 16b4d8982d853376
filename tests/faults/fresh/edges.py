"""Faults of the bound on gradients: what its norm is taken of, and how often it is applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.parallel import policy, reduction
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import MOMENTS


@fault(
    category="L",
    fresh=True,
    source="a fused optimizer that is told the factor of a clip which was applied before",
    cases=("gpt2",),
    first="optimizer",
    names=MOMENTS,
    rules=("clip-of-gradients", "state-of-a-rank-unclipped", "inputs-hold"),
)
def factor_of_the_clip_applied_twice(patch: Patch) -> None:
    """Gradients are multiplied by the factor that clips them twice."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        norm: Tensor = right(self, limit)
        if limit is not None:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(factor)
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    fresh=True,
    source="AReaL#312: a norm that is taken before the gradients of ranks are added",
    variants=("dp4-packed-mbs2",),
    first="grad_norm",
    ranks=(0, 1, 2, 3),
    rules=("norm", "norm-of-a-part", "inputs-hold"),  # both name another time
)
def norm_before_ranks_are_summed(patch: Patch) -> None:
    """The norm is that of each rank's own gradient, before the sum over ranks; the gradients themselves are right."""
    right: Any = reduction.sum_gradients
    kept: list[Tensor] = []

    def noted(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        own = [local(p.grad) for p in parameters.values() if p.grad is not None]
        kept[:] = [torch.linalg.vector_norm(grad) for grad in own]
        right(parameters, groups)

    patch.setattr(policy, "sum_gradients", noted)
    patch.setattr(ParallelPolicy, "_total_norm", lambda *_: torch.linalg.vector_norm(torch.stack(kept)))


@fault(
    category="L",
    fresh=True,
    source="DeepSpeed PR#5411: experts that are a group of their own for clipping",
    cases=("moe",),
    variants=("ep2",),
    first="optimizer",
    names=r".*\.experts\..*/exp_avg(_sq)?",
    ranks=(0, 1),
    rules=("clip-of-gradients", "state-of-a-rank-unclipped", "inputs-hold"),  # the first one names a part
)
def experts_clipped_by_their_own_norm(patch: Patch) -> None:
    """Gradients of experts are clipped by the norm of all experts, others by the norm of all gradients."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        found = [p.grad for name, p in self.named_parameters() if ".experts." in name and p.grad is not None]
        before = [grad.clone() for grad in found]
        norm: Tensor = right(self, limit)
        if limit is not None:
            square = torch.stack([grad.square().sum() for grad in before]).sum()
            dist.all_reduce(square)
            factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
            for grad, known in zip(found, before, strict=True):
                grad.copy_(known * factor)
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)
