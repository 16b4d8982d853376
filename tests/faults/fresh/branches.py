"""Faults inside of a layer: what is activated in its MLP, and when its heads are scaled."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION


@fault(
    category="T",
    fresh=True,
    source="fused kernels that take the second half of a projection for its gate",
    cases=("tied",),
    variants=("packed-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("module", "inputs-hold"),
)
def activation_on_the_other_branch(patch: Patch) -> None:
    """The activation function is applied to the second input of a product, and not to its gate."""

    def wrong(self: Any, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
        return found

    patch.setattr(modeling_llama.LlamaMLP, "forward", wrong)


@fault(
    category="T",
    fresh=True,
    source="kernels that fuse the norms of heads with the rotation, in the other order",
    variants=("varlen-mbs4",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("rotary", "module", "inputs-hold"),  # the first position of a sample is not rotated
)
def heads_scaled_behind_the_rotation(patch: Patch) -> None:
    """Queries and keys are multiplied by the weights of their norms behind the rotation, not before it."""
    attention: Any = modeling_qwen3.Qwen3Attention.forward
    right: Any = modeling_qwen3.apply_rotary_pos_emb
    running: list[Any] = []

    def noted(self: Any, *args: Any, **rest: Any) -> Any:
        running[:] = [self]
        return attention(self, *args, **rest)

    def wrong(query: Tensor, key: Tensor, *tables: Any, **rest: Any) -> tuple[Tensor, Tensor]:
        (layer,) = running
        of_query, of_key = layer.q_norm.weight, layer.k_norm.weight
        rotated = right(query / of_query, key / of_key, *tables, **rest)
        return rotated[0] * of_query, rotated[1] * of_key

    patch.setattr(modeling_qwen3.Qwen3Attention, "forward", noted)
    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", wrong)
