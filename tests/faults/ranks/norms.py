"""Faults in the norm of gradients that lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.parallel import sharded
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    MOMENTS,
)


@fault(
    category="L",
    source="torchtitan#766",
    cases=("dense",),
    variants=("fsdp2",),
    first="grad_norm",
    ranks=(0, 1),
    rules=("norm-of-a-part",),
)
def norm_of_own_shard(patch: Patch) -> None:
    patch.setattr(ParallelPolicy, "_total_norm", LocalPolicy._total_norm)


@fault(
    category="L",
    source="NeMo-RL PR#3788, ROCm TransformerEngine PR#715",
    cases=("dense",),
    variants=("tp2",),
    first="grad_norm",
    ranks=(0, 1),
    rules=("norm-of-a-part",),
    also=(Shown("dense", "dp2", "grad_norm", ranks=(0, 1)),),
)
def replicas_counted_each(run: Run) -> None:
    """Parameters on several ranks enter the norm once for each of them."""
    model: Any = run.trainer.policy
    model._owned = frozenset(name for name, _ in model.named_parameters())


@fault(
    category="L",
    source="DeepSpeed PR#5411, DeepSpeed#8475",
    cases=("moe",),
    variants=("ep2",),
    first="grad_norm",
    ranks=(0, 1),
    rules=("norm-of-a-part", "norm"),
)
def experts_left_out_of_the_norm(run: Run) -> None:
    model: Any = run.trainer.policy
    model._owned = frozenset(name for name in model._owned if name not in model._experts)


@fault(
    category="L",
    source="AReaL#312",
    cases=("tied",),
    variants=("fsdp2",),
    first="optimizer",
    ranks=(0, 1),
    rules=("clip-of-gradients", "state-of-a-rank-unclipped"),
    names=MOMENTS,
)
def clipped_by_own_norm(patch: Patch) -> None:
    """The norm is right where it is reported, and that of the rank's own part where it is used."""
    right: Any = ParallelPolicy.clip_grad_norm

    def wrong(self: ParallelPolicy, max_norm: float | None) -> Tensor:
        norm = right(self, None)
        grads = [local(p.grad) for _, p in self.named_parameters() if p.grad is not None]
        own = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        for grad in grads:
            grad.mul_((max_norm / own).clamp(max=1.0))
        return norm

    patch.setattr(ParallelPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    source="pytorch#149768",
    cases=("tied",),
    variants=("fsdp2",),
    first="optimizer",
    ranks=(0, 1),
    rules=("clip-of-gradients",),
    names=MOMENTS,
    silent={"tied/fsdp2-fp32": "3e-7 of the gradient is less than the noise of float32"},
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def epsilon_of_every_rank(patch: Patch) -> None:
    """norm + 1e-6 on a partial sum adds it once for each rank."""
    right: Any = ParallelPolicy.clip_grad_norm

    def wrong(self: ParallelPolicy, max_norm: float | None) -> Tensor:
        assert max_norm is not None
        found: Tensor = right(self, max_norm - 1e-6 * max_norm / right(self, None).item())
        return found

    patch.setattr(ParallelPolicy, "clip_grad_norm", wrong)


@fault(
    category="O",
    source="accelerate on CPUs: the precision policy never reaches FSDP",
    cases=("tied",),
    variants=("fsdp2",),
    precisions=("mixed",),
    first="activations",
    status="dtype",
    says="golden bfloat16, actual float32",
    rules=("dtype",),
)
def precision_policy_ignored(patch: Patch) -> None:
    """Blocks compute in the dtype of the weights, not in that of the precision policy."""
    policy: Any = MixedPrecisionPolicy
    patch.setattr(sharded, "MixedPrecisionPolicy", lambda **_: policy())


# @@new
