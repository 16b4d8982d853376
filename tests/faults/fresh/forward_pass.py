"""Faults of the forward pass, written at once, before any of them was tried."""

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from regress.engine import causal_lm_policy
from regress.replay.fault_injection import around
from tests.faults.fault import fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION

FIRST_BLOCK = "activations model.layers.0"


def of_first_block(change):
    """Return a function that changes a run by its first block."""

    def inject(run):
        change(run.trainer.policy.model.model.layers[0])

    inject.__name__, inject.__qualname__ = change.__name__, change.__qualname__
    inject.__module__, inject.__doc__ = change.__module__, change.__doc__
    return inject


@fault("T", FIRST_BLOCK, "module", names=AFTER_ATTENTION)
@met_in("norms with the epsilon of another family")
@of_first_block
def epsilon_of_a_norm_is_larger(block):
    """The first norm of the first block adds 1e-2 to the variance."""
    block.input_layernorm.variance_epsilon = 1e-2


@fault("T", FIRST_BLOCK, "module", names=AFTER_ATTENTION)
@met_in("softmax scales of a head size that was padded")
@of_first_block
def attention_scale_of_another_head_size(block):
    """Queries and keys of the first block are scaled as if heads were twice as wide."""
    block.self_attn.scaling /= 2**0.5


@fault("T", FIRST_BLOCK, "module", names=AFTER_ATTENTION)
@met_in("gelu for silu")
@of_first_block
def gelu_in_the_first_block(block):
    """The MLP of the first block takes GELU in place of SiLU."""
    block.mlp.act_fn = nn.GELU()


@fault("T", FIRST_BLOCK, "module module-scale", names=AFTER_ATTENTION)
@met_in("a residual that is scaled by depth")
@of_first_block
def branch_of_the_mlp_scaled(block):
    """Multiply the output of the MLP of the first block by 0.9."""
    block.mlp.register_forward_hook(lambda module, args, out: 0.9 * out)


@fault("T", FIRST_BLOCK, "rotary module", names=AFTER_ATTENTION)
@met_in("rope_theta of the base model, not of the long-context one")
@around(modeling_qwen3, "apply_rotary_pos_emb")
def queries_rotated_twice_as_far(right, query, key, cos, sin, *rest, **more):
    """Angles of the rotation are doubled."""
    return right(query, key, cos.square() - sin.square(), 2 * cos * sin, *rest, **more)


@fault("T", "activations model.embed_tokens", "embedding module-scale module")
@met_in("Gemma's scale of embeddings in a model of another family")
def embeddings_scaled(run):
    """Embeddings are multiplied by the root of their width."""
    run.trainer.policy.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out * out.shape[-1] ** 0.5, prepend=True
    )


@fault("T", FIRST_BLOCK, "heads module", names=AFTER_ATTENTION)
@met_in("heads that are stored in another order")
@of_first_block
def two_halves_of_the_values_exchanged(block):
    """The heads of values of the first block change places."""
    block.self_attn.v_proj.register_forward_hook(
        lambda module, args, out: out.roll(out.shape[-1] // 2, dims=-1)
    )


@fault("T", "activations lm_head", "output-projection")
@met_in("a bias that is added to the tokens of a language")
def bias_on_one_token(run):
    """The logit of one token is larger by 0.1."""
    head = run.trainer.policy.model.get_output_embeddings()

    def wrong(module, args, out):
        out = out.clone()
        out[..., 5] += 0.1
        return out

    head.register_forward_hook(wrong, prepend=True)


@fault("H", "log_probs log_probs", "log-softmax")
@met_in("a cap of logits in the scoring alone")
@around(causal_lm_policy, "token_log_probs")
def logits_capped_in_the_scoring(right, logits, *args, **rest):
    """Logits pass a hyperbolic tangent at 3 before the log-softmax."""
    return right(3 * torch.tanh(logits / 3), *args, **rest)


@fault("H", "log_probs log_probs", "log-softmax targets")
@met_in("samplers that never draw the padding token, and trainers that count it")
@around(causal_lm_policy, "token_log_probs")
def one_token_left_out_of_the_softmax(right, logits, *args, **rest):
    """The first token of the vocabulary has no part in the sum of the softmax."""
    changed = logits.clone()
    changed[..., 0] -= 1e9
    return right(changed, *args, **rest)
