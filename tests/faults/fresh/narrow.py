"""Precision faults that show where strategies meet: ranks, packing and a narrower dtype at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regress.parallel import all_gather, sequence, sharded, vocabulary
from regress.parallel.exchange import gather
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="keys and values that are compressed on their way",
    variants=("dp2-cp2-gather-ddp-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("context-exchange", "module", "precision"),
)
def keys_gathered_in_bfloat16(patch: Patch) -> None:
    """Keys and values of all ranks are gathered in half precision, within replicas and packed rows."""
    right: Any = gather
    patch.setattr(all_gather, "gather", lambda tensor, *rest: right(rounded(tensor), *rest))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="FSDP: reduce_dtype of another configuration",
    variants=("fsdp2-tp2-mbs3",),
    first="gradient",
    # gradients: the sum over tensor ranks of what was rounded is not, so that its values fit into no narrower dtype
    rules=("gradient-dtype", "precision", "gradients"),
)
def shards_reduced_in_bfloat16(patch: Patch) -> None:
    """Gradients of parts of matrices are summed over shards in half precision."""
    right: Any = sharded.apply

    def wrong(*args: Any, **rest: Any) -> None:
        right(*args, **{**rest, "reduce_dtype": torch.bfloat16})

    patch.setattr(sharded, "apply", wrong)


class _BackInHalf(torch.autograd.Function):
    """Passes a tensor on, and its gradient back in half precision."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().to(grad.dtype)


def back_in_half(tensor: Tensor) -> Tensor:
    """Return the tensor; what comes back to it is rounded to half precision."""
    found: Tensor = _BackInHalf.apply(tensor)
    return found


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="gradients of hidden states sent in half precision",
    cases=("tied",),
    variants=("dp2-pp2-mbs2",),
    first="gradient",
    rules=(
        "gradient-of-a-stage",
        "precision",
        "backward-of-a-module",
    ),  # the last one names what ranks hand back
)
def gradients_handed_back_in_bfloat16(patch: Patch) -> None:
    """The last stage hands gradients of hidden states back in half precision, within replicas."""
    right: Any = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Any, hidden: Tensor | None = None) -> Tensor:
        return right(self, model, micro, None if hidden is None else back_in_half(hidden))

    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="TransformerEngine: a vocabulary-parallel sum in half precision",
    variants=("tp2-packed-chunk7",),
    first="log_probs",
    rules=(
        "softmax-dtype",
        "precision",
        "vocabulary-parts",
    ),  # the last one names sums of parts and the dtype
)
def sums_of_the_vocabulary_in_bfloat16(patch: Patch) -> None:
    """Sums of exponentials of parts of the vocabulary are joined in half precision, chunk by chunk."""
    right: Any = vocabulary._local_sums

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        maximum, sums = right(*args)
        return maximum, torch.cat([rounded(sums[:1]), sums[1:]])

    patch.setattr(vocabulary, "_local_sums", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="sequence parallelism that gathers in half precision",
    variants=("dp2-tp2-sp-packed",),
    first="activations model.norm",
    rules=("tensor-exchange", "module-dtype", "precision"),
)
def columns_gathered_in_bfloat16(patch: Patch) -> None:
    """Columns of hidden states are gathered behind the last norm in half precision."""
    right: Any = sequence._all_columns
    patch.setattr(sequence, "_all_columns", lambda part, group: right(part.bfloat16().to(part.dtype), group))
