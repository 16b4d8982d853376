"""Faults of single layers of a model."""

import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.harmless.model import modules_of
from tests.faults.ranks.helpers import AFTER_ATTENTION, on_rank
from tests.faults.rounding import outputs_rounded


@fault("T", "activations model.layers.0", "heads module", on="dense/packed-eager", names=AFTER_ATTENTION)
@met_in("repeat in place of repeat_interleave")
@in_place_of(modeling_qwen3, "repeat_kv")
def key_heads_tiled_in_eager_attention(states, times):
    """Heads of keys are repeated one after the other, so that queries meet keys of another group."""
    return states.repeat(1, times, 1, 1)


# the sum over ranks spreads it to all
@fault(
    "T",
    "activations model.layers.0",
    "tensor-exchange module precision inputs-hold",
    kind="precision",
    on="dense/tp2-sp",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
)
@met_in("a fused kernel of another release on one host, which takes activations in half precision")
def activation_of_a_rank_in_bfloat16(run):
    """One of two tensor-parallel ranks gives its part of the activations of an MLP in half precision."""
    if on_rank(1):
        outputs_rounded(run, "act_fn")


# names its activation function
@fault(
    "T", "activations transformer.h.1", "module", on="gpt2/varlen", names=r"transformer\.(h\.1|ln_f)|lm_head"
)
@met_in("gelu for gelu_new: a kernel that knows one of the two")
def exact_gelu_in_the_last_block(run):
    """The last block computes GELU by its integral, where the model was made with the approximation by tanh."""
    model = run.trainer.policy.model
    model.transformer.h[-1].mlp.act = nn.GELU()


@fault("T", "activations model.layers.0", "module inputs-hold", on="tied/packed-mbs3", names=AFTER_ATTENTION)
@met_in("fused kernels that take the second half of a projection for its gate")
@in_place_of(modeling_llama.LlamaMLP, "forward")
def activation_on_the_other_branch(self, x):
    """The activation function is applied to the second input of a product, and not to its gate."""
    return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


# the first position of a sample is not rotated
@fault(
    "T",
    "activations model.layers.0",
    "rotary module inputs-hold",
    on="dense/varlen-mbs4",
    names=AFTER_ATTENTION,
)
@met_in("kernels that fuse the norms of heads with the rotation, in the other order")
def heads_scaled_behind_the_rotation(patch):
    """Queries and keys are multiplied by the weights of their norms behind the rotation, not before it."""
    running = []

    def noted(attention, self, *args, **rest):
        running[:] = [self]
        return attention(self, *args, **rest)

    def wrong(right, query, key, *tables, **rest):
        (layer,) = running
        of_query, of_key = layer.q_norm.weight, layer.k_norm.weight
        rotated = right(query / of_query, key / of_key, *tables, **rest)
        return rotated[0] * of_query, rotated[1] * of_key

    patch.around(modeling_qwen3.Qwen3Attention, "forward", noted)
    patch.around(modeling_qwen3, "apply_rotary_pos_emb", wrong)


@fault(
    "T",
    "activations model.layers.0",
    "tensor-exchange pipeline-exchange module precision inputs-hold",
    kind="precision",
    on="tied/tp2-pp2-mbs4",
    names=AFTER_ATTENTION,
)
@met_in("a fused SwiGLU kernel that writes half precision")
def gated_values_in_bfloat16(run):
    """Round the gated values of an MLP to half precision before the product that follows."""

    def wrong(_, args):
        return (rounded(args[0]), *args[1:])

    for module in modules_of(run, lambda one: hasattr(one, "gate_proj") and hasattr(one, "down_proj")):
        module.down_proj.register_forward_pre_hook(wrong, prepend=True)


@fault("T", "activations lm_head", "output-projection module")
@met_in("a cap of final logits of another family")
def logits_capped(run):
    """Logits pass a hyperbolic tangent that caps them at 30."""
    head = run.trainer.policy.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: 30.0 * torch.tanh(out / 30.0), prepend=True)


@fault("T", "activations model.layers.0", "module")
@met_in("Megatron#1304: layers numbered otherwise in a checkpoint")
@torch.no_grad()
def layers_exchanged(run):
    """Weights of layer 0 are loaded into layer 1, and those of layer 1 into layer 0."""
    named = dict(run.trainer.policy.named_parameters())
    for name, parameter in named.items():
        if "layers.0." in name:
            other = named[name.replace("layers.0.", "layers.1.")]
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)


@fault(
    "T",
    "activations model.layers.0",
    "rotary module inputs-hold",
    on="tied/packed-mbs3",
    names=AFTER_ATTENTION,
)
@met_in("partial_rotary_factor of another model's configuration")
@around(modeling_llama, "apply_rotary_pos_emb")
def half_of_each_head_rotated(right, q, k, cos, sin, *rest):
    """Positions rotate the first half of each head's columns, and leave the other half as it is."""
    half = q.shape[-1] // 2
    angles = (torch.cat([one[..., : half // 2]] * 2, -1) for one in (cos, sin))
    query, key = right(q[..., :half], k[..., :half], *angles, *rest)
    return torch.cat([query, q[..., half:]], -1), torch.cat([key, k[..., half:]], -1)
