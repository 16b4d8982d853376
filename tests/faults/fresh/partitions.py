"""Faults of matrices and vocabularies that are partitioned over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import embedding as looked_up

from regress.engine.local import local
from regress.parallel import conv1d, embedding, policy
from regress.parallel.conv1d import RowwiseConv
from regress.parallel.vocabulary import vocab_parallel_log_probs
from tests.faults.fault import fault
from tests.faults.fresh.attention import AFTER_BLOCK_0
from tests.faults.patch import Patch
from tests.faults.rounding import rounded


@fault(
    category="C",
    fresh=True,
    source="the bias of a row-parallel layer, added before the sum over ranks",
    cases=("gpt2",),
    variants=("tp2",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    ranks=(0, 1),
    rules=("tensor-exchange", "module"),
)
def bias_enters_the_sum_of_every_rank(patch: Patch) -> None:
    """Each rank adds the bias to its part of the product, and the parts are summed."""
    right: Any = RowwiseConv._forward

    def wrong(self: RowwiseConv, module: nn.Module, mesh: Any, x: Tensor) -> Tensor:
        bias: Any = module.bias
        return right(self, module, mesh, x) + (mesh.size() - 1) * local(bias)

    patch.setattr(RowwiseConv, "_forward", wrong)


@fault(
    category="C",
    fresh=True,
    source="the range of a vocabulary whose last id is taken as a part of it",
    variants=("tp2-packed-chunk7",),
    first="activations model.embed_tokens",
    ranks=(0, 1),
    rules=("embedding", "tensor-exchange", "module"),  # the first names wrong ids; one token is on two ranks
)
def first_id_of_the_next_part_looked_up_twice(patch: Patch) -> None:
    """A rank also looks up the id behind its last row, in that last row."""

    def wrong(module: nn.Embedding, mesh: Any, ids: Tensor) -> Tensor:
        start, stop = embedding.rows_of(module.weight)
        weight = local(module.weight)
        elsewhere = (ids < start) | (ids > stop)
        own = (ids - start).clamp(max=len(weight) - 1).masked_fill(elsewhere, 0)
        padding = module.padding_idx
        padding = padding - start if padding is not None and start <= padding < stop else None
        found = looked_up(own, weight, padding).masked_fill(elsewhere[..., None], 0)
        parts = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    patch.setattr(embedding, "_look_up", wrong)


@fault(
    category="H",
    fresh=True,
    source="NeMo-RL PR#935: a temperature that the path of a split vocabulary lacks",
    cases=("dr_grpo",),
    variants=("dp2-tp2-sp-packed",),
    first="log_probs log_probs",
    ranks=(0, 1, 2, 3),
    rules=(
        "temperature",
        "log-softmax",
        "vocabulary-parts",
    ),  # the last two name the temperature
)
def temperature_not_passed_to_a_split_vocabulary(patch: Patch) -> None:
    """Log-probs of a split vocabulary are those of the logits as they are."""
    right: Any = vocab_parallel_log_probs

    def wrong(*args: Any, temperature: float, **rest: Any) -> Any:
        return right(*args, temperature=1.0, **rest)

    patch.setattr(policy, "vocab_parallel_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a sum over tensor-parallel ranks in half precision",
    cases=("gpt2",),
    variants=("tp2-sp-pp2",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=("tensor-exchange", "module", "precision"),
)
def parts_of_products_summed_in_bfloat16(patch: Patch) -> None:
    """Each rank rounds its part of a product to half precision before parts are summed and scattered."""

    def wrong(self: RowwiseConv, module: nn.Module, mesh: Any, x: Tensor) -> Tensor:
        own = rounded(conv1d._product(x, conv1d._plain(module.weight)))
        partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        whole: Tensor = partial.redistribute(placements=[self.output_layout]).to_local()
        return whole + conv1d._plain(module.bias)

    patch.setattr(RowwiseConv, "_forward", wrong)
