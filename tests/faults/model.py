"""Faults of the model and of its log-probs."""

import math
from dataclasses import replace

import torch
from torch import nn

from regress.engine import causal_lm_policy
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import TokenBatch
from regress.errors import ReplayError
from regress.grpo import token_losses
from regress.replay.fault_injection import around
from regress.replay.probes.model_probes import (
    logits_one_late,
    no_sampler_correction,
    norm_epsilon,
    old_is_current,
    reference_is_the_policy,
    stale_weight,
)
from tests.faults.fault import fault, met_in


# module: only the layer as a whole is recorded, and its router is among what is named
@fault(
    "F",
    "activations model.layers.0",
    "router module",
    on="moe/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
)
@met_in("transformers: norm_topk_prob of other checkpoints")
def router_not_normalized(run):
    """The weights of the chosen experts do not add up to 1."""
    routers = [m for m in run.trainer.policy.model.modules() if getattr(m, "norm_topk_prob", False)]
    if not routers:
        raise ReplayError("there is no router")
    for router in routers:
        router.norm_topk_prob = False


fault(
    "T",
    "activations model.layers.0",
    "module",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    precisions="float64 float32",
    blind=("loss 5 %", "cosine 0.99"),
)(met_in("eps of another configuration")(norm_epsilon))

fault(
    "J", "ref_log_probs ref_log_probs", "reference-is-the-policy", place="step0/rank0/micro0", tokens="all"
)(met_in("TRL#3194")(reference_is_the_policy))

fault(
    "H", "activations lm_head", "logits-shifted", place="step0/rank0/micro0", tokens="all", probe="log_probs"
)(met_in("prime-rl PR#1525, ms-swift PR#8196")(logits_one_late))


@fault("H", "log_probs log_probs", "targets-off-by-one", place="step0/rank0/micro0", tokens="after another")
@met_in("verl#6475")
@around(TokenBatch, "_project")
def targets_one_early(right, self, *args):
    """The target is the token before the predicted one."""
    micro = right(self, *args)
    return replace(micro, targets=micro.input_ids.reshape(-1)[micro.local - 1])


fault(
    "K",
    "old_log_probs old_log_probs",
    "old-is-current",
    on="dapo/mbs4",
    place="step0/update1/rank0/micro0",
    update=1,
    tokens="all",
)(met_in("slime PR#179")(old_is_current))

fault(
    "K",
    "sampler_weights sampler_weights",
    "sampler-correction-off",
    on="cispo/mbs4",
    place="step0/update0/rank0/micro0",
)(met_in("Liger-Kernel#1082")(no_sampler_correction))

fault("P", "activations lm_head", "output-projection module-scale", silent={})(
    met_in("TRL#5312, verl#7495")(stale_weight)
)


@fault("H", "log_probs log_probs", "log-softmax vocabulary-parts")
@met_in("TRL#6789, vllm#42259")
@around(causal_lm_policy, "token_log_probs")
def log_probs_over_top_k(right, logits, targets, **rest):
    """Log-probs are normalized over the eight likeliest tokens and the sampled one."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    kept.scatter_(-1, logits.topk(8, dim=-1).indices, True)
    kept.scatter_(-1, targets[..., None], True)
    return right(logits.masked_fill(~kept, -torch.inf), targets, **rest)


@fault("H", "old_log_probs old_log_probs", "log-probs-shifted old-log-probs")
@met_in("prime-rl PR#1525, ms-swift PR#8196")
@around(TokenBatch, "sampler_log_probs")
def sampler_log_probs_one_late(right, self, dtype):
    """Log-probs of the sampler are read one token off."""
    found = right(self, dtype)
    return None if found is None else found.roll(1)


@fault(
    "K",
    "old_log_probs old_log_probs",
    "old-log-probs",
    on="cispo/mbs4",
    silent={"dense": "the configuration asks for them"},
)
@met_in("verl: rollout log-probs in place of recomputed ones")
@around(Trainer, "_recorded")
def old_log_probs_of_the_sampler(right, self, mini):
    """Old log-probs are those of the sampler, and should be recomputed."""
    found = right(self, mini)
    return replace(found, tokens=replace(found.tokens, old_log_probs=found.tokens.sampler_log_probs))


@fault("K", "sampler_weights sampler_weights", "sampler-mismatch", on="cispo/mbs4", update=1)
@met_in("slime PR#179")
@around(token_losses, "_correction")
def correction_of_the_current_policy(right, log_probs, given, objective):
    """The sampler's weights are those of the policy that is trained, not of the one before the updates."""
    return right(log_probs, replace(given, old=log_probs.detach()), objective)


# module: only the layer as a whole is recorded, and its router is among what is named
@fault("F", "activations model.layers.0", "router module", on="moe/mbs4", tokens="all", probe="log_probs")
@met_in("Megatron PR#4256: routers disagree")
def one_expert_fewer(run):
    """Each token has one expert in place of two."""
    routers = [m for m in run.trainer.policy.model.modules() if hasattr(m, "norm_topk_prob")]
    if not routers:
        raise ReplayError("there is no router")
    for router in routers:
        router.top_k -= 1


@fault("H", "activations model.layers.0", "module")
@met_in("TRL PR#3234, TRL#2042, trlX#107")
def dropout_left_on(run):
    """Dropout is active in the trainer's forward pass, and was not in the sampler's."""
    for name, module in run.trainer.policy.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.1, training=True))


@fault("T", "activations model.layers.0", "module module-scale", tokens="")
@met_in("Megatron#1503: 1 / sqrt of another head dimension")
def attention_not_scaled(run):
    """Scores are not divided by the root of the head dimension."""
    for module in run.trainer.policy.model.modules():
        if hasattr(module, "scaling") and hasattr(module, "q_proj"):
            module.scaling = 1.0


# module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
@fault("T", "activations model.layers.0", "rotary module")
@met_in("rope_theta of another checkpoint")
def rotary_base_of_another_model(run):
    """Rotary frequencies have the base 500000 in place of 10000."""
    for name, buffer in run.trainer.policy.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.pow_(math.log(500000) / math.log(10000))


# module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
@fault("T", "activations model.layers.0", "rotary module")
@met_in("linear RoPE scaling that the sampler has not")
def positions_interpolated(run):
    """Positions are halved before the rotation."""
    for name, buffer in run.trainer.policy.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


@fault("T", "activations model.layers.0", "module", tokens="all", probe="log_probs")
@met_in("hidden_act of another family")
def another_activation_function(run):
    """GELU in place of SiLU."""
    for module in run.trainer.policy.model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()


@fault("T", "activations model.layers.0", "rotary module")
@met_in("transformers: rotate_half and interleaved rotation")
def rotation_interleaved(run):
    """The columns of queries and keys are paired 0-1, 2-3, and the weights are made for halves."""
    for name, parameter in run.trainer.policy.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = parameter.data.view(-1, 8, parameter.shape[1])
            heads.copy_(torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1))
