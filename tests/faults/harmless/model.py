"""Refactorings of the model, its inputs and its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3 import modeling_qwen3

from regress.engine import attention, policy
from regress.engine.attention import VarlenSegments
from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.errors import ReplayError
from regress.layout import TokenLayout
from tests.faults.fault import fault
from tests.faults.inputs import projected
from tests.faults.patch import Patch

EVERY = ("float64", "float32", "bfloat16")


def modules_of(run: Run, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the modules of the policy that are wanted; there have to be some."""
    found = [module for module in run.trainer.policy.model.modules() if wanted(module)]
    if not found:
        raise ReplayError("there is no such module")
    return found


@fault(category="T", kind="harmless", precisions=EVERY)
def norms_divide_by_roots(run: Run) -> None:
    """RMSNorm divides by a root, in place of multiplying by its reciprocal."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        mean = (wide * wide).mean(-1, keepdim=True)
        return self.weight * (wide / torch.sqrt(mean + self.variance_epsilon)).to(hidden.dtype)

    for module in modules_of(run, lambda one: hasattr(one, "variance_epsilon")):
        module.forward = functools.partial(forward, module)


@fault(category="T", kind="harmless", precisions=EVERY)
def norms_by_torch(run: Run) -> None:
    """torch.nn.functional.rms_norm."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        own = functional.rms_norm(wide, wide.shape[-1:], eps=self.variance_epsilon)
        return self.weight * own.to(hidden.dtype)

    for module in modules_of(run, lambda one: hasattr(one, "variance_epsilon")):
        module.forward = functools.partial(forward, module)


@fault(category="T", kind="harmless", precisions=("float64", "float32"))
def activation_by_sigmoid(run: Run) -> None:
    """SiLU as x times its sigmoid."""
    for module in modules_of(run, lambda one: hasattr(one, "act_fn")):
        module.act_fn = Product()


class Product(nn.Module):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@fault(category="T", kind="harmless", precisions=EVERY)
def products_by_einsum(run: Run) -> None:
    """Linear layers of the blocks as Einstein sums."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)

    for module in modules_of(run, lambda one: isinstance(one, nn.Linear) and one.bias is None):
        if module is not run.trainer.policy.model.get_output_embeddings():
            module.forward = functools.partial(forward, module)


@fault(category="T", kind="harmless", precisions=EVERY)
def products_of_transposed_weights(run: Run) -> None:
    """Linear layers multiply by a transposed copy of their weight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x @ self.weight.T.contiguous()

    for module in modules_of(run, lambda one: isinstance(one, nn.Linear) and one.bias is None):
        if module is not run.trainer.policy.model.get_output_embeddings():
            module.forward = functools.partial(forward, module)


@fault(category="T", kind="harmless", cases=("dense", "gpt2"), precisions=EVERY)
def embedding_as_product(run: Run) -> None:
    """Token embeddings as a product with a one-hot matrix; the row of padding has no gradient, as in torch."""
    embedding: Any = run.trainer.policy.model.get_input_embeddings()

    def forward(ids: Tensor) -> Tensor:
        weight, padding = embedding.weight, embedding.padding_idx
        if padding is not None:
            row = torch.arange(len(weight))[:, None] == padding
            weight = torch.where(row, weight.detach(), weight)
        return functional.one_hot(ids, len(weight)).to(weight.dtype) @ weight

    embedding.forward = forward


@fault(category="T", kind="harmless", precisions=EVERY)
def gate_and_up_in_one(run: Run) -> None:
    """Both projections into the MLP are one product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        both = functional.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    for module in modules_of(run, lambda one: hasattr(one, "gate_proj") and hasattr(one, "act_fn")):
        module.forward = functools.partial(forward, module)


@fault(category="G", kind="harmless", cases=("dense", "gpt2"), variants=("packed-mbs3", "left-mbs3"))
def additive_mask_for_sdpa(patch: Patch) -> None:
    """torch's attention gets an additive mask in place of a boolean one."""
    right: Any = attention.block_causal_mask

    def other(layout: TokenLayout, implementation: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return right(layout, "eager", dtype, device)

    patch.setattr(policy, "block_causal_mask", other)


@fault(
    category="G", kind="harmless", variants=("packed-mbs3", "left-mbs3"), precisions=("float64", "float32")
)
def mask_by_loops(patch: Patch) -> None:
    """The attention mask is made segment by segment."""

    def other(layout: TokenLayout, *_: Any) -> Tensor:
        rows, columns = layout.shape
        mask = torch.eye(columns, dtype=torch.bool).repeat(rows, 1, 1)
        for segment in layout.segments:
            stop = segment.col + segment.stop - segment.start
            own = torch.ones(stop - segment.col, stop - segment.col, dtype=torch.bool).tril()
            mask[segment.row, segment.col : stop, segment.col : stop] = own
        return mask[:, None]

    patch.setattr(policy, "block_causal_mask", other)


@fault(
    category="G",
    kind="harmless",
    cases=("dense", "gpt2"),
    variants=("left-mbs3", "mbs4"),
    precisions=("float64", "float32"),
)
def another_token_at_padding(patch: Patch) -> None:
    """The model reads token 3 where nothing lies."""
    right: Any = LocalPolicy._run

    def other(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        there = torch.from_numpy(micro.layout.attention_mask)
        return right(self, model, replace(micro, input_ids=torch.where(there, micro.input_ids, 3)), *rest)

    patch.setattr(LocalPolicy, "_run", other)


@fault(
    category="G",
    kind="harmless",
    cases=("dense", "gpt2"),
    variants=("varlen",),
    precisions=("float64", "float32"),
)
def segments_always_gathered(patch: Patch) -> None:
    """Segments are gathered by their index also where they fill the row."""

    def other(layout: TokenLayout, local_index: Tensor) -> VarlenSegments:
        lengths = tuple(segment.stop - segment.start for segment in layout.segments)
        return VarlenSegments(local_index, lengths)

    patch.setattr(VarlenSegments, "of", other)


@fault(category="G", kind="harmless", precisions=EVERY)
def inputs_copied(patch: Patch) -> None:
    """Every tensor of a microbatch is a copy."""

    def copied(micro: Microbatch) -> Microbatch:
        own: dict[str, Any] = {
            n: value.clone() for n, value in vars(micro).items() if isinstance(value, Tensor)
        }
        return replace(micro, **own)

    projected(patch, copied)


@fault(category="H", kind="harmless", precisions=("float64", "float32"))
def logits_of_all_positions(patch: Patch) -> None:
    """The output projection sees all positions, and the rows of the loss tokens are picked from its output."""

    @contextmanager
    def other(model: Any, index: Tensor, counted: Tensor | None = None) -> Iterator[None]:
        head = model.get_output_embeddings()
        handle = head.register_forward_hook(
            lambda _, __, out: out.flatten(0, 1).index_select(0, index).unsqueeze(0), prepend=True
        )
        try:
            yield
        finally:
            handle.remove()

    patch.setattr(policy, "logits_at", other)


@fault(category="T", kind="harmless", precisions=EVERY)
def rotation_by_complex_numbers(patch: Patch) -> None:
    """Queries and keys are rotated as complex numbers."""

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    def other(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", other)


@fault(category="F", kind="harmless", cases=("moe",), precisions=("float64",))
def chosen_experts_in_another_order(run: Run) -> None:
    """The router names the chosen experts in ascending order."""

    def sorted_by_number(_: Any, __: Any, out: Any) -> Any:
        logits, weights, chosen = out
        order = chosen.argsort(dim=-1)
        return logits, weights.gather(-1, order), chosen.gather(-1, order)

    for module in modules_of(run, lambda one: hasattr(one, "norm_topk_prob")):
        module.register_forward_hook(sorted_by_number)
