"""Refactorings of the model, its inputs and its attention."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3 import modeling_qwen3

from regress.engine import causal_lm_policy
from regress.engine.attention import VarlenSegments
from regress.engine.causal_lm_policy import LocalPolicy
from regress.errors import ReplayError
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import harmless
from tests.faults.inputs import projected

EVERY = ("float64", "float32", "bfloat16")


def modules_of(run, wanted):
    """Return the modules of the policy that are wanted; there have to be some."""
    found = [module for module in run.trainer.policy.model.modules() if wanted(module)]
    if not found:
        raise ReplayError("there is no such module")
    return found


@harmless("T", precisions="float64 float32 bfloat16")
def norms_divide_by_roots(run):
    """RMSNorm divides by a root, in place of multiplying by its reciprocal."""

    def forward(self, hidden):
        wide = hidden.to(torch.float32)
        mean = (wide * wide).mean(-1, keepdim=True)
        return self.weight * (wide / torch.sqrt(mean + self.variance_epsilon)).to(hidden.dtype)

    for module in modules_of(run, lambda one: hasattr(one, "variance_epsilon")):
        module.forward = functools.partial(forward, module)


@harmless("T", precisions="float64 float32 bfloat16")
def norms_by_torch(run):
    """torch.nn.functional.rms_norm."""

    def forward(self, hidden):
        wide = hidden.to(torch.float32)
        own = functional.rms_norm(wide, wide.shape[-1:], eps=self.variance_epsilon)
        return self.weight * own.to(hidden.dtype)

    for module in modules_of(run, lambda one: hasattr(one, "variance_epsilon")):
        module.forward = functools.partial(forward, module)


@harmless("T", precisions="float64 float32")
def activation_by_sigmoid(run):
    """SiLU as x times its sigmoid."""
    for module in modules_of(run, lambda one: hasattr(one, "act_fn")):
        module.act_fn = Product()


class Product(nn.Module):
    """x sigmoid(x)."""

    def forward(self, x):
        return x * torch.sigmoid(x)


@harmless("T", precisions="float64 float32 bfloat16")
def products_by_einsum(run):
    """Linear layers of the blocks as Einstein sums."""

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)

    for module in modules_of(run, lambda one: isinstance(one, nn.Linear) and one.bias is None):
        if module is not run.trainer.policy.model.get_output_embeddings():
            module.forward = functools.partial(forward, module)


@harmless("T", precisions="float64 float32 bfloat16")
def products_of_transposed_weights(run):
    """Linear layers multiply by a transposed copy of their weight."""

    def forward(self, x):
        return x @ self.weight.T.contiguous()

    for module in modules_of(run, lambda one: isinstance(one, nn.Linear) and one.bias is None):
        if module is not run.trainer.policy.model.get_output_embeddings():
            module.forward = functools.partial(forward, module)


@harmless("T", on="dense/mbs4 gpt2/mbs4", precisions="float64 float32 bfloat16")
def embedding_as_product(run):
    """Token embeddings as a product with a one-hot matrix; the row of padding has no gradient, as in torch."""
    embedding = run.trainer.policy.model.get_input_embeddings()

    def forward(ids):
        weight, padding = embedding.weight, embedding.padding_idx
        if padding is not None:
            row = torch.arange(len(weight))[:, None] == padding
            weight = torch.where(row, weight.detach(), weight)
        return functional.one_hot(ids, len(weight)).to(weight.dtype) @ weight

    embedding.forward = forward


@harmless("T", precisions="float64 float32 bfloat16")
def gate_and_up_in_one(run):
    """Both projections into the MLP are one product."""

    def forward(self, x):
        both = functional.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    for module in modules_of(run, lambda one: hasattr(one, "gate_proj") and hasattr(one, "act_fn")):
        module.forward = functools.partial(forward, module)


@harmless("G", on="dense/packed-mbs3 dense/left-mbs3 gpt2/packed-mbs3 gpt2/left-mbs3")
@around(causal_lm_policy, "block_causal_mask")
def additive_mask_for_sdpa(right, layout, implementation, dtype, device):
    """torch's attention gets an additive mask in place of a boolean one."""
    return right(layout, "eager", dtype, device)


@harmless("G", on="dense/packed-mbs3 dense/left-mbs3", precisions="float64 float32")
@in_place_of(causal_lm_policy, "block_causal_mask")
def mask_by_loops(layout, *_):
    """The attention mask is made segment by segment."""
    rows, columns = layout.shape
    mask = torch.eye(columns, dtype=torch.bool).repeat(rows, 1, 1)
    for segment in layout.segments:
        stop = segment.col + segment.stop - segment.start
        own = torch.ones(stop - segment.col, stop - segment.col, dtype=torch.bool).tril()
        mask[segment.row, segment.col : stop, segment.col : stop] = own
    return mask[:, None]


@harmless("G", on="dense/left-mbs3 dense/mbs4 gpt2/left-mbs3 gpt2/mbs4", precisions="float64 float32")
@around(LocalPolicy, "_run")
def another_token_at_padding(right, self, model, micro, *rest):
    """The model reads token 3 where nothing lies."""
    there = torch.from_numpy(micro.layout.attention_mask)
    return right(self, model, replace(micro, input_ids=torch.where(there, micro.input_ids, 3)), *rest)


@harmless("G", on="dense/varlen gpt2/varlen", precisions="float64 float32")
def segments_always_gathered(patch):
    """Segments are gathered by their index also where they fill the row."""

    def other(layout, local_index):
        lengths = tuple(segment.stop - segment.start for segment in layout.segments)
        return VarlenSegments(local_index, lengths)

    patch.setattr(VarlenSegments, "of", other)


@harmless("G", precisions="float64 float32 bfloat16")
@by(projected)
def inputs_copied(micro):
    """Every tensor of a microbatch is a copy."""
    own = {n: value.clone() for n, value in vars(micro).items() if isinstance(value, Tensor)}
    return replace(micro, **own)


@harmless("H", precisions="float64 float32")
@in_place_of(causal_lm_policy, "logits_at")
@contextmanager
def logits_of_all_positions(model, index, counted=None):
    """The output projection sees all positions, and the rows of the loss tokens are picked from its output."""
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(
        lambda _, __, out: out.flatten(0, 1).index_select(0, index).unsqueeze(0), prepend=True
    )
    try:
        yield
    finally:
        handle.remove()


@harmless("T", precisions="float64 float32 bfloat16")
def rotation_by_complex_numbers(patch):
    """Queries and keys are rotated as complex numbers."""

    def rotated(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        c, s = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    def other(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", other)


@harmless("F", on="moe/mbs4", precisions="float64")
def chosen_experts_in_another_order(run):
    """The router names the chosen experts in ascending order."""

    def sorted_by_number(_, __, out):
        logits, weights, chosen = out
        order = chosen.argsort(dim=-1)
        return logits, weights.gather(-1, order), chosen.gather(-1, order)

    for module in modules_of(run, lambda one: hasattr(one, "norm_topk_prob")):
        module.register_forward_hook(sorted_by_number)
