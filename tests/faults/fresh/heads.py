"""Faults of heads of attention: how they are cut, how their parts travel, and what their weights are stored in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3

from regress.parallel import conv1d, exchange, ulysses
from regress.parallel.segments import attend
from tests.faults.fault import fault
from tests.faults.fresh.attention import AFTER_BLOCK_0
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="C",
    fresh=True,
    source="Megatron: a fused projection of queries, keys and values that is cut as if it were one matrix",
    cases=("gpt2",),
    variants=("tp4",),
    first="activations transformer.h.0",
    names=AFTER_BLOCK_0,
    rules=(
        "module",  # names its weights; nothing is wrong with the sums among ranks
        "tensor-exchange",  # accepted after the first run: names a rank's part of the weights
    ),
)
def fused_projection_cut_in_one_piece(patch: Patch) -> None:
    """A rank holds neighbouring columns of queries, keys and values side by side, not its heads of each."""
    right: Any = conv1d.split_parameter

    def wrong(module: nn.Module, name: str, mesh: Any, dim: int, fused: int) -> None:
        right(module, name, mesh, dim, 1)

    patch.setattr(conv1d, "split_parameter", wrong)


@fault(
    category="D",
    fresh=True,
    source="a gather of keys whose backward pass averages",
    cases=("tied",),
    variants=("cp3-gather-packed-budget96",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0|layers\.1\.(input_layernorm|self_attn\.[kv]_proj))\..*",
    rules=("backward-of-a-module", "gradient-averaged-over-ranks"),
)
def gradients_of_gathered_keys_averaged(patch: Patch) -> None:
    """Gradients of keys and values that all ranks have gathered are divided by the number of ranks."""
    right: Any = exchange._Gather.backward

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        found, *_ = right(ctx, grad)
        return found / ctx.ranks, None, None

    patch.setattr(exchange._Gather, "backward", staticmethod(wrong))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="an all-to-all of attention's output in half precision",
    variants=("dp2-cp2-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=(
        "module",
        "precision",
        "context-exchange",  # accepted after the first run: names what ranks of a sequence exchange, and a dtype
    ),
)
def heads_return_in_bfloat16(patch: Patch) -> None:
    """Outputs of heads for all columns are rounded to half precision before they go back to their columns."""
    right: Any = attend
    patch.setattr(ulysses, "attend", lambda *args: rounded(right(*args)))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="softmax of attention in the dtype of half-precision queries",
    variants=("packed-eager",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("module", "precision"),
)
def attention_weights_in_bfloat16(patch: Patch) -> None:
    """Eager attention rounds its weights to half precision before they meet the values."""

    def wrong(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        times = module.num_key_value_groups
        scores = query @ modeling_qwen3.repeat_kv(key, times).mT * scaling
        weights = rounded((scores if mask is None else scores + mask).softmax(-1))
        out = weights @ modeling_qwen3.repeat_kv(value, times)
        return out.transpose(1, 2).contiguous(), weights

    patch.setattr(modeling_qwen3, "eager_attention_forward", wrong)
