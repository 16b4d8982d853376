"""Fewer bits than there should be: precision faults of values on the way forward."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from regress.engine import causal_lm_policy, grpo_trainer
from regress.engine import optimizer as optim
from regress.errors import ReplayError
from regress.grpo import token_losses
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import (
    logits_in_bfloat16,
    old_in_bfloat16,
    products_in_tensorfloat32,
    rotary_in_bfloat16,
    rounded,
    weights_in_half_precision,
)
from tests.faults.fault import fault, met_in

# module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
fault(
    "O",
    "activations model.layers.0",
    "rotary module long-context",
    kind="precision",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    precisions="float32 float64",
)(met_in("Modalities PR#462, transformers PR#29285")(rotary_in_bfloat16))

fault("O", "log_probs log_probs", "log-softmax softmax-dtype", kind="precision")(
    met_in("OpenRLHF PR#634, genlm-backend PR#66")(logits_in_bfloat16)
)

# ratio-dtype: proven: the ratio of old log-probs that were rounded to bfloat16
fault("O", "ratio prob_ratio", "ratio ratio-dtype", kind="precision")(
    met_in("log-probs stored in half precision")(old_in_bfloat16)
)

fault("O", "activations model.embed_tokens", "module-dtype embedding", kind="precision")(
    met_in("verl: weights synchronized in half precision")(weights_in_half_precision)
)

fault("O", "activations model.layers.0", "module", kind="precision")(
    met_in("torch.backends.cuda.matmul.allow_tf32")(products_in_tensorfloat32)
)


def outputs_rounded(run, ending, dtype=torch.bfloat16):
    """Round the outputs of modules whose names end so."""
    found = [module for name, module in run.trainer.policy.model.named_modules() if name.endswith(ending)]
    if not found:
        raise ReplayError(f"there is no module {ending}")
    for module in found:
        module.register_forward_hook(lambda _, __, out: rounded(out, dtype), prepend=True)


@fault("O", "activations lm_head", "module-dtype output-projection", kind="precision")
@met_in("torchtitan PR#3667, TRL PR#4303")
def head_in_bfloat16(run):
    """The output projection gives logits in half precision."""
    outputs_rounded(run, "lm_head")


@fault("O", "activations model.layers.0", "module module-dtype", kind="precision")
@met_in("norms under autocast")
def norms_in_bfloat16(run):
    """Norms inside of the layers give half precision."""
    outputs_rounded(run, "layernorm")


@fault("O", "activations model.layers.0", "module module-dtype", kind="precision")
@met_in("a residual stream in half precision")
def residuals_in_float16(run):
    """Outputs of layers are rounded to float16."""
    outputs_rounded(run, ("layers.0", "layers.1"), torch.float16)


@fault("O", "activations model.layers.0", "module", kind="precision")
@met_in("a KV cache in half precision")
def values_in_bfloat16(run):
    """Values of the attention are rounded to half precision."""
    outputs_rounded(run, "v_proj")


@fault("O", "ref_log_probs ref_log_probs", "reference", kind="precision")
@met_in("NeMo-RL: a reference in half precision")
def reference_in_bfloat16(run):
    """The reference has weights of half precision."""
    reference = run.trainer.reference
    if reference is None:
        raise ReplayError("there is no reference")
    with torch.no_grad():
        for _, parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().to(parameter.dtype))


@fault("O", "advantages advantages", "advantage-dtype", kind="precision")
@met_in("advantages under autocast")
@around(grpo_trainer, "token_advantages")
def advantages_in_bfloat16(right, *args):
    """Advantages are rounded to half precision."""
    return rounded(right(*args))


# rounded: proven by the values; when silence was written down, no rule knew of it
@fault("O", "weights weights", "rounded", kind="precision")
@met_in("weights of tokens in float16")
@around(grpo_trainer, "weigh")
def token_weights_in_float16(right, *args, **rest):
    """Weights of tokens are rounded to float16."""
    return rounded(right(*args, **rest), torch.float16)


@fault("O", "ratio prob_ratio", "rounded ratio ratio-dtype", kind="precision")
@met_in("a ratio under autocast")
@around(token_losses, "importance_ratio")
def ratio_in_bfloat16(right, *args):
    """Importance ratios are rounded to half precision."""
    return rounded(right(*args))


@fault("O", "log_probs log_probs", "softmax-dtype log-softmax", kind="precision")
@met_in("rllm#816: log-probs stored in float16")
@around(causal_lm_policy, "token_log_probs")
def log_probs_in_float16(right, *args, **rest):
    """Log-probs are rounded to float16 when they are known."""
    found = right(*args, **rest)
    return replace(found, log_probs=rounded(found.log_probs, torch.float16))


@fault("O", "entropy entropy", "softmax-dtype", kind="precision")
@met_in("verl: entropy under autocast")
@around(causal_lm_policy, "token_log_probs")
def entropy_in_bfloat16(right, *args, **rest):
    """Entropies are rounded to half precision."""
    found = right(*args, **rest)
    return replace(found, entropy=None if found.entropy is None else rounded(found.entropy))


# rounded: proven by the values; when silence was written down, no rule knew of it
@fault("O", "optimizer", "rounded", kind="precision", names=r".*/exp_avg(_sq)?")
@met_in("moments in half precision")
@around(optim, "update")
def moments_in_bfloat16(right, optimizer):
    """The moments of the optimizer are kept in half precision."""
    right(optimizer)
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


@fault("O", "param", "param-dtype", kind="precision")
@met_in("Megatron#1359, OpenTau#185")
@around(optim, "update")
def parameters_in_bfloat16(right, optimizer):
    """Updated parameters are kept in half precision: there are no master weights."""
    right(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.copy_(parameter.data.bfloat16())


@fault("O", "activations model.layers.0", "module module-dtype", kind="precision", precisions="float64")
@met_in("float32 inside of a float64 model: Hugging Face modules")
@in_place_of(causal_lm_policy, "arithmetic")
def float32_inside_of_float64(dtype):
    """`model.double()` alone: norms, rotary embeddings and the softmax of a float64 model cast to float32."""
    return nullcontext()
