"""Faults of ring attention: blocks that are skipped, and what its backward pass is told of the forward one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from regress.parallel import ring
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.fresh.attention import AFTER_BLOCK_0
from tests.faults.patch import Patch
from tests.faults.rounding import rounded


@fault(
    category="D",
    fresh=True,
    source="a ring kernel that skips blocks by a test made for contiguous shards",
    cases=("gpt2",),
    variants=("cp4-ring-zigzag",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=(
        "packed-leak",
        "context-exchange",  # names the order of zigzag parts, and the mask of local columns
        "long-context",  # only the later of a rank's two parts is wrong: names a block of a kernel, and a mask
        "module",
        "inputs-hold",
    ),
)
def blocks_skipped_by_their_first_query(patch: Patch) -> None:
    """The ring skips keys that a rank's first column does not see, though its second zigzag part sees them."""

    def wrong(self: ContextSegments) -> tuple[Tensor | None, ...]:
        blocks = self.local_mask.chunk(self.ranks, dim=3)
        return tuple(block if bool(block[:, :, 0].any()) else None for block in blocks)

    patch.setattr(ContextSegments, "blocks", property(wrong))


@fault(
    category="D",
    kind="precision",
    fresh=True,
    source="a softmax statistic that is kept in the dtype of the output",
    variants=("cp2-ring-packed",),
    first="gradient",
    ranks=(0, 1),
    rules=("backward-of-a-module", "precision", "gradients", "inputs-hold"),
)
def normalizer_of_the_ring_kept_in_bfloat16(patch: Patch) -> None:
    """The log-sum-exp of each row is kept in half precision until the backward pass of the ring reads it."""
    right: Any = ring._Ring.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        *rest, log_sum = ctx.saved_tensors
        told = SimpleNamespace(saved_tensors=(*rest, rounded(log_sum)), scale=ctx.scale, context=ctx.context)
        return right(told, grad)

    patch.setattr(ring._Ring, "backward", staticmethod(wrong))
