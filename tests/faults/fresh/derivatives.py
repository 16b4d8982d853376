"""Faults of backward passes whose values are right: of rotations, of sums over ranks, and of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from regress.grpo import logprobs
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import DividedGradient


@fault(
    category="R",
    fresh=True,
    source="a fused kernel of rotary embeddings whose backward pass rotates forwards",
    variants=("varlen-mbs4",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0)\..*"
    r"|model\.layers\.1\.(input_layernorm|self_attn\.[qk]_(proj|norm))\..*",
    rules=("backward-of-a-module", "gradients"),  # the first names a kernel
)
def rotation_turned_on_the_way_back(patch: Patch) -> None:
    """Gradients of queries and keys are rotated by their positions once more, not back."""
    right: Any = modeling_qwen3.apply_rotary_pos_emb

    def wrong(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        values = right(q.detach(), k.detach(), cos, sin, *rest)
        paths = right(q, k, cos, -sin, *rest)
        query, key = (value + (path - path.detach()) for value, path in zip(values, paths, strict=True))
        return query, key

    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", wrong)


@fault(
    category="R",
    fresh=True,
    source="a differentiable all-reduce whose backward pass takes the mean over ranks",
    cases=("gspo",),
    variants=("cp4",),
    first="token_gradient token_gradient",
    rules=(
        "ratio-gradient-of-a-part",
        "token-gradient-of-ranks",  # names an average over ranks along a dimension
        "token-gradient-power-of-two",
        "token-gradient-scale",
        "token-gradient",
    ),
)
def sum_over_a_sample_averaged_on_the_way_back(patch: Patch) -> None:
    """Sums over the ranks that share a sample are right, and what comes back through them is averaged over these."""
    right: Any = ParallelPolicy.sum_over_context_parallel

    def wrong(self: ParallelPolicy, values: Tensor) -> Tensor:
        if values.requires_grad:
            values = DividedGradient.apply(values, self._world.mesh.sizes["cp"])
        found: Tensor = right(self, values)
        return found

    patch.setattr(ParallelPolicy, "sum_over_context_parallel", wrong)


@fault(
    category="R",
    kind="precision",
    fresh=True,
    source="Liger-Kernel: gradients that overwrite logits of half precision",
    variants=("vocab8",),
    first="logit_gradient logit_gradient",
    rules=("rounded", "logit-gradient", "dtype", "precision"),  # the second one names the dtype
)
def gradients_of_logits_in_bfloat16(patch: Patch) -> None:
    """The gradient of logits is rounded to half precision before it goes on to the output projection."""
    right: Any = logprobs.logits_gradient

    def wrong(*args: Any) -> Tensor:
        found: Tensor = right(*args)
        return found.bfloat16().to(found.dtype)

    patch.setattr(logprobs, "logits_gradient", wrong)
