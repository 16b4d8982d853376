"""Fewer bits than there should be: precision faults of values on the way forward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import optim, policy, trainer
from regress.engine.build import Run
from regress.engine.step import weigh
from regress.errors import ReplayError
from regress.grpo import losses
from regress.grpo.advantages import token_advantages
from regress.grpo.logprobs import token_log_probs
from regress.grpo.ratios import importance_ratio
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    precisions=("float32", "float64"),
    category="O",
    kind="precision",
    source="Modalities PR#462, transformers PR#29285",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    # module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
    rules=("rotary", "module", "long-context"),
    calibration=True,
)
def rotary_in_bfloat16(run: Run) -> None:
    """Rotary frequencies are rounded to half precision."""
    buffers = [b for name, b in run.trainer.policy.model.named_buffers() if name.endswith("inv_freq")]
    if not buffers:
        raise ReplayError("there are no rotary positions")
    for buffer in buffers:
        buffer.copy_(buffer.bfloat16())


@fault(
    category="O",
    kind="precision",
    source="OpenRLHF PR#634, genlm-backend PR#66",
    first="log_probs log_probs",
    rules=("log-softmax", "softmax-dtype"),
    small=True,
    calibration=True,
)
def logits_in_bfloat16(patch: Patch) -> None:
    """Log-probs come from logits rounded to half precision."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda logits, *args, **rest: right(logits.bfloat16().to(logits.dtype), *args, **rest),
    )


@fault(
    category="O",
    kind="precision",
    source="log-probs stored in half precision",
    first="ratio prob_ratio",
    # ratio-dtype: proven: the ratio of old log-probs that were rounded to bfloat16
    rules=("ratio", "ratio-dtype"),
    small=True,
    calibration=True,
)
def old_in_bfloat16(patch: Patch) -> None:
    """Recorded log-probs are rounded to half precision."""
    right: Any = importance_ratio
    patch.setattr(
        losses,
        "importance_ratio",
        lambda new, old, *rest: right(new, old.bfloat16().to(old.dtype), *rest),
    )


@fault(
    category="O",
    kind="precision",
    source="verl: weights synchronized in half precision",
    first="activations model.embed_tokens",
    rules=("module-dtype", "embedding"),
    small=True,
    calibration=True,
)
@torch.no_grad()
def weights_in_half_precision(run: Run) -> None:
    """Weights are rounded to float16 on their way to the trainer."""
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(parameter.half().to(parameter.dtype))


@fault(
    category="O",
    kind="precision",
    source="torch.backends.cuda.matmul.allow_tf32",
    first="activations model.layers.0",
    rules=("module",),
    small=True,
    calibration=True,
)
def products_in_tensorfloat32(run: Run) -> None:
    """Inputs of the linear layers lose 13 bits of their mantissa."""

    def rounded(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        mantissa, exponent = torch.frexp(args[0])
        return (torch.ldexp((mantissa * 2048).round() / 2048, exponent), *args[1:])

    for name, module in run.trainer.policy.model.named_modules():
        if name.endswith(("_proj", "c_attn", "c_fc")):
            module.register_forward_pre_hook(rounded)


def rounded(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor with the bits of a narrower dtype, in its own; the gradient passes through."""
    return tensor + (tensor.detach().to(dtype).to(tensor.dtype) - tensor.detach())


def outputs_rounded(run: Run, ending: str | tuple[str, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    """Round the outputs of modules whose names end so."""
    found = [module for name, module in run.trainer.policy.model.named_modules() if name.endswith(ending)]
    if not found:
        raise ReplayError(f"there is no module {ending}")
    for module in found:
        module.register_forward_hook(lambda _, __, out: rounded(out, dtype), prepend=True)


@fault(
    category="O",
    kind="precision",
    source="torchtitan PR#3667, TRL PR#4303",
    first="activations lm_head",
    rules=("module-dtype", "output-projection"),
)
def head_in_bfloat16(run: Run) -> None:
    """The output projection gives logits in half precision."""
    outputs_rounded(run, "lm_head")


@fault(
    category="O",
    kind="precision",
    source="norms under autocast",
    first="activations model.layers.0",
    rules=("module", "module-dtype"),
)
def norms_in_bfloat16(run: Run) -> None:
    """Norms inside of the layers give half precision."""
    outputs_rounded(run, "layernorm")


@fault(
    category="O",
    kind="precision",
    source="a residual stream in half precision",
    first="activations model.layers.0",
    rules=("module", "module-dtype"),
)
def residuals_in_float16(run: Run) -> None:
    """Outputs of layers are rounded to float16."""
    outputs_rounded(run, ("layers.0", "layers.1"), torch.float16)


@fault(
    category="O",
    kind="precision",
    source="a KV cache in half precision",
    first="activations model.layers.0",
    rules=("module",),
)
def values_in_bfloat16(run: Run) -> None:
    """Values of the attention are rounded to half precision."""
    outputs_rounded(run, "v_proj")


@fault(
    category="O",
    kind="precision",
    source="NeMo-RL: a reference in half precision",
    first="ref_log_probs ref_log_probs",
    rules=("reference",),
)
def reference_in_bfloat16(run: Run) -> None:
    """The reference has weights of half precision."""
    reference = run.trainer.reference
    if reference is None:
        raise ReplayError("there is no reference")
    with torch.no_grad():
        for _, parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().to(parameter.dtype))


@fault(
    category="O",
    kind="precision",
    source="advantages under autocast",
    first="advantages advantages",
    rules=("advantage-dtype",),
)
def advantages_in_bfloat16(patch: Patch) -> None:
    """Advantages are rounded to half precision."""
    right: Any = token_advantages
    patch.setattr(trainer, "token_advantages", lambda *args: rounded(right(*args)))


@fault(
    category="O",
    kind="precision",
    source="weights of tokens in float16",
    first="weights weights",
    # rounded: proven by the values; when silence was written down, no rule knew of it
    rules=("rounded",),
)
def token_weights_in_float16(patch: Patch) -> None:
    """Weights of tokens are rounded to float16."""
    right: Any = weigh
    patch.setattr(trainer, "weigh", lambda *args, **rest: rounded(right(*args, **rest), torch.float16))


@fault(
    category="O",
    kind="precision",
    source="a ratio under autocast",
    first="ratio prob_ratio",
    rules=("rounded", "ratio", "ratio-dtype"),
)
def ratio_in_bfloat16(patch: Patch) -> None:
    """Importance ratios are rounded to half precision."""
    right: Any = importance_ratio
    patch.setattr(losses, "importance_ratio", lambda *args: rounded(right(*args)))


@fault(
    category="O",
    kind="precision",
    source="rllm#816: log-probs stored in float16",
    first="log_probs log_probs",
    rules=("softmax-dtype", "log-softmax"),
)
def log_probs_in_float16(patch: Patch) -> None:
    """Log-probs are rounded to float16 when they are known."""
    right: Any = token_log_probs

    def wrong(*args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, log_probs=rounded(found.log_probs, torch.float16))

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    source="verl: entropy under autocast",
    first="entropy entropy",
    rules=("softmax-dtype",),
)
def entropy_in_bfloat16(patch: Patch) -> None:
    """Entropies are rounded to half precision."""
    right: Any = token_log_probs

    def wrong(*args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, entropy=None if found.entropy is None else rounded(found.entropy))

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    source="moments in half precision",
    first="optimizer",
    names=r".*/exp_avg(_sq)?",
    # rounded: proven by the values; when silence was written down, no rule knew of it
    rules=("rounded",),
)
def moments_in_bfloat16(patch: Patch) -> None:
    """The moments of the optimizer are kept in half precision."""
    right: Any = optim.update

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        right(optimizer)
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())

    patch.setattr(optim, "update", wrong)


@fault(
    category="O", kind="precision", source="Megatron#1359, OpenTau#185", first="param", rules=("param-dtype",)
)
def parameters_in_bfloat16(patch: Patch) -> None:
    """Updated parameters are kept in half precision: there are no master weights."""
    right: Any = optim.update

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        right(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(parameter.data.bfloat16())

    patch.setattr(optim, "update", wrong)


@fault(
    category="O",
    kind="precision",
    source="float32 inside of a float64 model: Hugging Face modules",
    precisions=("float64",),
    first="activations model.layers.0",
    rules=("module", "module-dtype"),
)
def float32_inside_of_float64(patch: Patch) -> None:
    """`model.double()` alone: norms, rotary embeddings and the softmax of a float64 model cast to float32."""
    patch.setattr(policy, "arithmetic", lambda dtype: nullcontext())


# @@new
