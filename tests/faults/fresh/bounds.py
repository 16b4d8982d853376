"""Faults of ratios and sampler weights: how they are averaged, normalized and bounded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regress.grpo import losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.ratios import importance_ratio
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="K",
    fresh=True,
    source="EasyR1 PR#596, ms-swift PR#6548: one of two sums over context-parallel ranks",
    cases=("gspo",),
    variants=("cp2-zigzag-packed-mbs4",),
    first="ratio prob_ratio",
    rules=("ratio-of-a-part", "ratio"),
)
def mean_over_the_length_on_the_rank(patch: Patch) -> None:
    """Log-ratios of a sample are summed over ranks, and divided by the number of its tokens on this one."""
    right: Any = importance_ratio

    def wrong(
        new: Tensor, old: Tensor, sequence: Tensor, count: int, objective: Any, complete: Any
    ) -> Tensor:
        def of_sums(values: Tensor) -> Tensor:
            return complete(values) if values.is_floating_point() else values

        return right(new, old, sequence, count, objective, of_sums)

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    fresh=True,
    source="GMPO's clip of tokens in a GSPO ratio",
    cases=("gspo",),
    variants=("reversed",),
    first="ratio prob_ratio",
    rules=("ratio",),  # names its formula and its clamps
)
def tokens_clipped_before_their_mean(patch: Patch) -> None:
    """The log-ratio of each token is held within the clip range before the mean of the sample is taken."""
    right: Any = importance_ratio

    def wrong(new: Tensor, old: Tensor, sequence: Tensor, count: int, objective: Any, *rest: Any) -> Tensor:
        low, high = objective.clip_range
        held = (new - old.detach()).clamp(math.log(low), math.log(high))
        return right(old.detach() + held, old, sequence, count, objective, *rest)

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    fresh=True,
    source="verl: rollout_is_batch_normalize within each microbatch",
    cases=("cispo",),
    variants=("packed-mbs3",),
    first="sampler_weights sampler_weights",
    rules=("sampler-mismatch",),  # names its normalization
)
def sampler_weights_normalized_in_each_microbatch(patch: Patch) -> None:
    """The sampler's weights are divided by their mean over the microbatch, and should not be normalized at all."""
    right: Any = losses._correction

    def wrong(*args: Any) -> Tensor | None:
        found: Tensor | None = right(*args)
        return None if found is None else found / found.mean()

    patch.setattr(losses, "_correction", wrong)


@fault(
    category="K",
    kind="precision",
    fresh=True,
    source="bounds of a clip as tensors of the model's dtype",
    variants=("packed",),
    first="policy_loss policy_loss",
    rules=(
        "clip-bound",
        "clip-range",
        "policy-loss",  # names its constants
        "precision",
    ),
)
def bounds_of_the_clip_in_bfloat16(patch: Patch) -> None:
    """The bounds that clip the ratio are rounded to half precision, the ratio is not."""
    right: Any = ObjectiveFields.clip_range

    def wrong(objective: ObjectiveFields) -> tuple[float, float]:
        low, high = (float(torch.tensor(bound).bfloat16()) for bound in right.fget(objective))
        return low, high

    patch.setattr(ObjectiveFields, "clip_range", property(wrong))
