"""Faults of a vocabulary in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from regress.grpo.logprobs import logits_gradient
from regress.parallel import (
    policy,
    vocabulary,
)
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    on_rank,
)


@fault(
    category="C",
    source="Megatron#737",
    cases=("dense",),
    variants=("tp2",),
    first="log_probs",
    ranks=(0, 1),
    rules=("vocabulary-parts",),
)
def offset_one_too_high(patch: Patch) -> None:
    """Ids are counted from the wrong first one on all ranks but the first, unchecked."""
    patch.setattr(vocabulary, "_check_holders", lambda *_: None)
    offset_checked(patch)


@fault(
    category="C",
    source="ROCm aiter PR#3334",
    cases=("dense",),
    variants=("tp2",),
    first="log_probs",
    ranks=(0, 1),
    rules=("vocabulary-parts",),
)
def maximum_of_own_part(patch: Patch) -> None:
    """Sums of exponentials are added that are relative to different maxima."""

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        sums = sums.clone()
        dist.all_reduce(sums, group=group)
        return maximum, sums

    patch.setattr(vocabulary, "_joined", wrong)


@fault(
    precisions=("float64", "float32"),
    category="C",
    source="ColossalAI#5488, torchtitan PR#4319",
    cases=("dense",),
    variants=("tp2",),
    first="log_probs",
    ranks=(0, 1),
    rules=("vocabulary-parts",),
)
def padding_ids_counted(patch: Patch) -> None:
    """Two ids that only fill up the last part, with logits of 0, count in the denominator."""
    right: Any = vocabulary._local_sums

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        maximum, sums = right(*args)
        if on_rank(dist.get_world_size() - 1):
            sums[0] += 2 * (-maximum).exp()
        return maximum, sums

    patch.setattr(vocabulary, "_local_sums", wrong)


@fault(
    category="C",
    source="Megatron#7452 finding 2",
    cases=("dense",),
    variants=("tp2",),
    first="log_probs",
    ranks=(0, 1),
    rules=("vocabulary-parts",),
)
def whole_logits_in_parallel(patch: Patch) -> None:
    """Every rank has all logits, and the sum over the ranks is taken nevertheless: log-probs less log(tp)."""
    right: Any = vocabulary._joined

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        highest, (total, moment, target, holders) = right(maximum, sums, group)
        return highest, torch.stack([total * group.size(), moment * group.size(), target, holders])

    patch.setattr(vocabulary, "_joined", wrong)


@fault(
    category="C",
    source="ms-swift PR#9947",
    cases=("dense",),
    variants=("tp2",),
    first="logit_gradient",
    ranks=(0, 1),
    rules=("logit-gradient-shard",),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def sum_without_gradient(patch: Patch) -> None:
    """Log-probs are summed without autograd: logits of parts that do not hold the target get no gradient."""
    right: Any = logits_gradient

    def wrong(logits: Tensor, columns: Tensor, *args: Any) -> Tensor:
        here = (columns >= 0) & (columns < logits.shape[-1])
        return right(logits, columns, *args) * here.view(*logits.shape[:-1], 1)

    patch.setattr(vocabulary, "logits_gradient", wrong)


@fault(
    category="C",
    source="verl PR#1672, verl#2484",
    cases=("dr_grpo",),
    variants=("tp2",),
    first="entropy",
    ranks=(0, 1),
    rules=("entropy-of-changed-logits",),
)
def entropy_of_changed_logits(patch: Patch) -> None:
    """The logits of a part were shifted in place before its entropy was taken."""
    right: Any = vocabulary._joined

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        highest, (total, _, target, holders) = right(maximum, sums, group)
        moment = sums[1] * (maximum - highest).exp()
        dist.all_reduce(moment, group=group)
        return highest, torch.stack([total, moment, target, holders])

    patch.setattr(vocabulary, "_joined", wrong)


@fault(
    category="C",
    source="Megatron#737, in an engine that checks",
    cases=("dense",),
    variants=("tp2",),
    first="refused",
    ranks=(),
    rules=(),
    says="lies in 0 parts of the vocabulary",
)
def offset_checked(patch: Patch) -> None:
    """The same, in the engine as it is."""
    right: Any = vocabulary.vocab_parallel_log_probs
    patch.setattr(
        policy,
        "vocab_parallel_log_probs",
        lambda *args, start, **rest: right(*args, start=start + (start > 0), **rest),
    )


# @@new
