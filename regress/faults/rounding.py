"""Fewer bits than there should be: precision faults of values on the way forward."""

from __future__ import annotations

from typing import Any

import torch

from regress.engine import policy
from regress.engine.build import Run
from regress.errors import ReplayError
from regress.faults.fault import fault
from regress.faults.patch import Patch
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs
from regress.grpo.ratios import importance_ratio


@fault(
    category="O",
    kind="precision",
    source="Modalities PR#462, transformers PR#29285",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("rotary",),
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
    rules=("ratio",),
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


# @@new
