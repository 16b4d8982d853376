"""Faults of context parallelism: masks, counts and sums of ranks that share sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regress.engine.batch import Microbatch
from regress.engine.reference import Reference
from regress.grpo import losses
from regress.grpo.ratios import importance_ratio
from regress.parallel import ring
from regress.parallel.policy import ParallelPolicy
from regress.parallel.segments import ContextSegments
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.rounding import rounded


@fault(
    category="D",
    fresh=True,
    source="Megatron#1464: a kernel whose backward pass is not told that attention is causal",
    variants=("cp2-ring-packed",),
    first="gradient",
    ranks=(0, 1),
    rules=("backward-of-a-module", "gradients", "inputs-hold"),
)
def mask_forgotten_on_the_way_back(patch: Patch) -> None:
    """The backward pass of the ring computes the weights of attention without the mask of its forward pass."""
    scores: Any = ring._scores
    right: Any = ring._Ring.backward
    back = [False]

    def unmasked(rows: Tensor, key: Tensor, visible: Tensor) -> Tensor:
        found: Tensor = scores(rows, key, torch.ones_like(visible) if back[0] else visible)
        return found

    def wrong(ctx: Any, grad: Tensor) -> Any:
        back[0] = True
        try:
            return right(ctx, grad)
        finally:
            back[0] = False

    patch.setattr(ring, "_scores", unmasked)
    patch.setattr(ring._Ring, "backward", staticmethod(wrong))


@fault(
    category="D",
    fresh=True,
    source="Megatron#7452 findings 3 and 9: a count of tokens that is not summed over parts of sequences",
    cases=("gspo",),
    variants=("cp2",),
    first="ratio",
    ranks=(0, 1),
    rules=("ratio-of-a-part", "ratio", "inputs-hold"),
)
def log_ratios_of_all_columns_over_the_length_of_some(patch: Patch) -> None:
    """The log-ratio of a sample is summed over all ranks, and divided by the number of its tokens on this one."""
    right: Any = importance_ratio

    def wrong(*args: Any) -> Tensor:
        *given, complete = args

        def of_values(values: Tensor) -> Tensor:
            found: Tensor = complete(values) if values.is_floating_point() else values
            return found

        found: Tensor = right(*given, of_values)
        return found

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="D",
    fresh=True,
    source="verl: a reference model that is left out of sequence parallelism",
    variants=("cp2-gather",),
    first="ref_log_probs",
    rules=("reference", "inputs-hold"),
)
def reference_attends_to_own_columns(patch: Patch) -> None:
    """Tokens of the reference see the keys that lie on their own rank, and no others."""
    right: Any = ContextSegments.local_mask.func  # type: ignore[attr-defined]  # a cached property
    log_probs: Any = Reference.log_probs
    asked = [False]

    def wrong(self: ContextSegments) -> Tensor:
        mask: Tensor = right(self)
        if not asked[0]:
            return mask
        parts = mask.chunk(self.ranks, dim=3)
        own = [part if at == self.rank else torch.zeros_like(part) for at, part in enumerate(parts)]
        return torch.cat(own, dim=3)

    def noted(self: Reference, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        asked[0] = True
        try:
            found: list[Tensor] = log_probs(self, microbatches)
            return found
        finally:
            asked[0] = False

    patch.setattr(ContextSegments, "local_mask", property(wrong))
    patch.setattr(Reference, "log_probs", noted)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="gradients of keys and values that are compressed on their way round the ring",
    variants=("cp2-ring-packed",),
    first="gradient",
    ranks=(0, 1),
    # gradients of weights are sums over what was rounded, which fit into no narrower dtype
    rules=("backward-of-a-module", "precision", "gradients", "inputs-hold"),
)
def gradients_of_keys_travel_in_bfloat16(patch: Patch) -> None:
    """Gradients of keys and values have half precision on every hop, and the keys and values themselves have not."""
    right: Any = ring._Shift

    def wrong(travelling: Tensor, context: ContextSegments) -> Any:
        if len(travelling) == 4:  # on the way back: keys, values and their gradients
            travelling = torch.cat((travelling[:2], rounded(travelling[2:])))
        return right(travelling, context)

    patch.setattr(ring, "_Shift", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a sum over context-parallel ranks under autocast",
    cases=("gspo",),
    variants=("cp2",),
    first="ratio",
    ranks=(0, 1),
    rules=("ratio", "ratio-of-a-part", "precision", "inputs-hold"),  # the second one names the sum over ranks
)
def log_ratios_completed_in_bfloat16(patch: Patch) -> None:
    """Each rank rounds its part of the log-ratio of a sample to half precision before the parts are added."""
    right: Any = ParallelPolicy.sum_over_context_parallel

    def wrong(self: ParallelPolicy, values: Tensor) -> Tensor:
        found: Tensor = right(self, rounded(values) if values.is_floating_point() else values)
        return found

    patch.setattr(ParallelPolicy, "sum_over_context_parallel", wrong)
