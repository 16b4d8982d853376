"""Faults of products, columns and logits that tensor-parallel ranks hold in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.functional import linear

from regress.engine.local import local
from regress.parallel import embedding, sequence, vocabulary
from tests.faults.fault import fault
from tests.faults.fresh.narrow import back_in_half
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION, EMBEDDED
from tests.faults.rounding import rounded


@fault(
    category="C",
    fresh=True,
    source="Megatron: scatter_to_sequence_parallel_region where reduce_scatter is due",
    variants=("dp2-tp2-sp-dealt",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1, 2, 3),
    rules=("tensor-exchange", "module"),
)
def products_scattered_and_not_summed(patch: Patch) -> None:
    """Each rank keeps its columns of its own part of a product, and the parts of other ranks are not added."""

    def wrong(_: Any, __: bool, ___: nn.Module, outputs: DTensor, mesh: Any) -> Tensor:
        own = outputs.to_local(grad_placements=[Replicate()])
        return own.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()

    patch.setattr(RowwiseParallel, "_prepare_output_fn", staticmethod(wrong))


@fault(
    category="C",
    fresh=True,
    source="Megatron#7452: a scatter of hidden states whose backward pass does not gather",
    variants=("tp2-sp-packed-budget64",),
    first="gradient model.embed_tokens.weight",
    names=EMBEDDED,
    ranks=(0, 1),
    rules=(
        "backward-of-a-module",  # names a collective without its gradient
        "gradient-of-one-tensor",  # names a part of its gradient that is not added
        "reduction",
        "gradients",
    ),
)
def columns_not_gathered_on_the_way_back(patch: Patch) -> None:
    """Embeddings are cut into columns, and each rank hands back the gradients of its own columns alone."""

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.zeros_like(grad) for _ in range(ctx.group.size())]
        parts[ctx.group.rank()] = grad
        return torch.cat(parts, dim=1), None

    patch.setattr(sequence._Split, "backward", staticmethod(wrong))


@fault(
    category="C",
    kind="precision",
    fresh=True,
    source="Megatron: an all-reduce of input gradients in the dtype of the logits' kernel",
    variants=("dp2-tp2",),
    first="gradient",
    names=r"model\..*",
    rules=("backward-of-a-module", "precision", "gradients"),
)
def gradients_behind_the_head_summed_in_bfloat16(patch: Patch) -> None:
    """Each part of the vocabulary rounds its gradient of hidden states to half precision, and parts are summed."""

    def wrong(module: nn.Linear, mesh: Any, hidden: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        mine = back_in_half(whole.to_local(grad_placements=[Partial()]))
        return linear(mine, local(module.weight), None if module.bias is None else local(module.bias))

    patch.setattr(embedding, "_project", wrong)


@fault(
    category="H",
    kind="precision",
    fresh=True,
    source="maxtext PR#5231: a target's logit in half precision less a log-sum-exp in float32",
    variants=("tp2-packed-chunk7",),
    first="log_probs log_probs",
    ranks=(0, 1),
    rules=(
        "log-softmax",
        "softmax-dtype",
        "vocabulary-parts",  # names what a rank does with its logits, and the dtype
        "precision",
    ),
)
def logits_of_targets_exchanged_in_bfloat16(patch: Patch) -> None:
    """The rank that holds a target gives its logit to the others in half precision; the log-sum-exp is exact."""
    right: Any = vocabulary._local_sums

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        maximum, sums = right(*args)
        return maximum, torch.cat([sums[:2], rounded(sums[2:3]), sums[3:]])

    patch.setattr(vocabulary, "_local_sums", wrong)
