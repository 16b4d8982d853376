"""Faults of backward passes whose values are right."""

from dataclasses import replace

import torch
from transformers.models.qwen3 import modeling_qwen3

from regress.engine import log_prob_projection
from regress.errors import ReplayError
from regress.grpo import selective_log_softmax, token_losses
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.optimizer import EMBEDDING
from tests.faults.ranks.helpers import EMBEDDED, DividedGradient, before_the_second_backward_pass


# of the weight that makes the values, and of the module above those that are off
@fault(
    "R",
    "gradient",
    "gradient-zero gradient-missing backward-of-a-module",
    on="dense/dp2",
    names=r"model\.(embed_tokens|layers\.0|layers\.1\.(input_layernorm|self_attn\.v_proj))\..*",
    ranks=(0, 1),
)
@met_in("a cache of values that is read without a graph")
def values_of_the_last_block_detached(run):
    """Values of the last block's attention are detached: their projection learns nothing, and what is below less."""
    model = run.trainer.policy.model
    model.model.layers[-1].self_attn.v_proj.register_forward_hook(lambda _, __, out: out.detach())


# the first names a kernel
@fault(
    "R",
    "gradient",
    "backward-of-a-module gradients",
    on="dense/varlen-mbs4",
    names=r"model\.(embed_tokens|layers\.0)\..*"
    r"|model\.layers\.1\.(input_layernorm|self_attn\.[qk]_(proj|norm))\..*",
)
@met_in("a fused kernel of rotary embeddings whose backward pass rotates forwards")
@around(modeling_qwen3, "apply_rotary_pos_emb")
def rotation_turned_on_the_way_back(right, q, k, cos, sin, *rest):
    """Gradients of queries and keys are rotated by their positions once more, not back."""
    values = right(q.detach(), k.detach(), cos, sin, *rest)
    paths = right(q, k, cos, -sin, *rest)
    query, key = (value + (path - path.detach()) for value, path in zip(values, paths, strict=True))
    return query, key


# names an average over ranks along a dimension
@fault(
    "R",
    "token_gradient token_gradient",
    "ratio-gradient-of-a-part token-gradient-of-ranks token-gradient-power-of-two token-gradient-scale token-gradient",
    on="gspo/cp4",
)
@met_in("a differentiable all-reduce whose backward pass takes the mean over ranks")
@around(ParallelPolicy, "sum_over_context_parallel")
def sum_over_a_sample_averaged_on_the_way_back(right, self, values):
    """Sums over the ranks that share a sample are right, and what comes back through them is averaged over these."""
    if values.requires_grad:
        values = DividedGradient.apply(values, self._world.mesh.sizes["cp"])
    return right(self, values)


# the second one names the dtype
@fault(
    "R",
    "logit_gradient logit_gradient",
    "rounded logit-gradient dtype precision",
    kind="precision",
    on="dense/vocab8",
)
@met_in("Liger-Kernel: gradients that overwrite logits of half precision")
@around(selective_log_softmax, "logits_gradient")
def gradients_of_logits_in_bfloat16(right, *args):
    """The gradient of logits is rounded to half precision before it goes on to the output projection."""
    found = right(*args)
    return found.bfloat16().to(found.dtype)


# names a mask of the backward pass
# by 0, where it is off
# the divergence is all that these tokens have
@fault(
    "R",
    "token_gradient token_gradient",
    "token-gradient token-gradient-scale kl-gradient samples-in-the-gradient inputs-hold",
    on="dense/packed-shortest-first",
)
@met_in("a trainer that spares the backward pass of tokens without advantage")
@around(token_losses, "_token_loss")
def tokens_without_advantage_not_sent_back(right, log_probs, given, *rest):
    """Tokens whose advantage is 0 have no gradient, though their divergence is a part of the loss."""
    found = right(log_probs, given, *rest)
    loss = torch.where(given.advantages == 0, found.loss_K.detach(), found.loss_K)
    return replace(found, loss_K=loss)


# names a scale on it
@fault(
    "R",
    f"gradient {EMBEDDING}",
    "gradient-of-one-tensor backward-of-a-module gradients inputs-hold",
    on="dense/reversed",
    names=EMBEDDED,
)
@met_in("torch: Embedding(scale_grad_by_freq=True)")
def embeddings_scaled_by_their_frequency(run):
    """The gradient of an embedding is divided by how often its token is in the microbatch."""
    embedding = run.trainer.policy.model.get_input_embeddings()
    embedding.scale_grad_by_freq = True


@fault(
    "R",
    "token_gradient",
    "token-gradient-power-of-two token-gradient-denominators token-gradient-scale",
    on="dense/dp2-packed-budget48",
    ranks=(1,),
    place="step0/rank1/micro1",
)
@met_in("a backward pass that is made again after an error, on one rank")
@by(before_the_second_backward_pass)
def second_microbatch_of_a_rank_goes_back_twice(_, share):
    """One rank makes the backward pass of its second microbatch twice."""
    return share.backward(retain_graph=True)


@fault(
    "R",
    "gradient",
    "gradient-missing gradient-zero backward-of-a-module",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    blind=FORWARD_CHECKS,
)
@met_in("a frozen layer by detach in place of requires_grad")
def hidden_states_detached_before_layer_1(run):
    """Hidden states are detached on their way into layer 1, so that nothing below it learns."""
    found = [m for n, m in run.trainer.policy.model.named_modules() if n.endswith("layers.1")]
    if not found:
        raise ReplayError("there is no layer 1")
    found[0].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))


@fault("R", "gradient", "backward-of-a-module", blind=FORWARD_CHECKS)
@met_in("Megatron#1503: a wrong dQ of fused attention")
def gradient_of_queries_scaled_again(run):
    """The gradient of queries is divided by the root of the head dimension once more."""

    factor = run.trainer.policy.model.config.head_dim**-0.5

    def scale(module, _, out):
        if out.requires_grad:
            out.register_hook(lambda grad: grad * factor)

    found = [m for n, m in run.trainer.policy.model.named_modules() if n.endswith("q_proj")]
    if not found:
        raise ReplayError("there are no queries")
    for module in found:
        module.register_forward_hook(scale)


@fault(
    "R", "logit_gradient logit_gradient", "logit-gradient logit-gradient-shard", on="dense/tp2-packed-chunk7"
)
@met_in("Liger-Kernel: a last block that is not full")
@around(log_prob_projection, "_in_chunks")
def last_chunk_without_gradient(right, model, hidden, targets, compute, chunk):
    """The last chunk of tokens is projected without a graph, behind a split vocabulary."""
    found = right(model, hidden, targets, compute, chunk)
    full = len(targets) - (len(targets) % chunk or chunk)
    values = torch.cat([found.log_probs[:full], found.log_probs[full:].detach()])
    return replace(found, log_probs=values)
