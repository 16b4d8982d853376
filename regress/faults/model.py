"""Faults in the model and its log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from regress.engine import build, policy, trainer
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.projection import logits_at
from regress.engine.step import train_step
from regress.errors import ReplayError
from regress.faults.patch import Patch
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs
from regress.grpo.ratios import importance_ratio

# the model


def router_not_normalized(run: Run) -> None:
    """The weights of the chosen experts do not add up to 1."""
    routers: list[Any] = [
        m for m in run.trainer.policy.model.modules() if getattr(m, "norm_topk_prob", False)
    ]
    if not routers:
        raise ReplayError("there is no router")
    for router in routers:
        router.norm_topk_prob = False


def norm_epsilon(run: Run) -> None:
    """Every RMSNorm has ten times its epsilon."""
    norms: list[Any] = [m for m in run.trainer.policy.model.modules() if hasattr(m, "variance_epsilon")]
    if not norms:
        raise ReplayError("there is no RMSNorm")
    for norm in norms:
        norm.variance_epsilon *= 10


def rotary_in_bfloat16(run: Run) -> None:
    """Rotary frequencies are rounded to half precision."""
    buffers = [b for name, b in run.trainer.policy.model.named_buffers() if name.endswith("inv_freq")]
    if not buffers:
        raise ReplayError("there are no rotary positions")
    for buffer in buffers:
        buffer.copy_(buffer.bfloat16())


def reference_is_the_policy(patch: Patch) -> None:
    patch.setattr(build, "build_reference", lambda *_: None)


# log-probs


def logits_one_late(patch: Patch) -> None:
    """The logits are those at a token, not those that predict it."""
    right: Any = logits_at
    patch.setattr(policy, "logits_at", lambda model, index, *rest: right(model, index + 1, *rest))


def targets_one_early(patch: Patch) -> None:
    """The target is the token before the predicted one."""
    right: Any = TokenBatch._project

    def early(self: TokenBatch, *args: Any) -> Microbatch:
        micro: Microbatch = right(self, *args)
        return replace(micro, targets=micro.input_ids.reshape(-1)[micro.local - 1])

    patch.setattr(TokenBatch, "_project", early)


def temperature_ignored(patch: Patch) -> None:
    """Samples are drawn from tempered logits, and scored by plain ones."""
    right: Any = token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, temperature, **rest: right(*args, **rest))


def old_is_current(patch: Patch) -> None:
    """Old log-probs are recomputed after the first update, so that every ratio is 1."""
    right: Any = train_step

    def wrong(model: LocalPolicy, optimizer: Any, tokens: LossTokens, *args: Any, **rest: Any) -> Any:
        return right(model, optimizer, replace(tokens, old_log_probs=None), *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


def no_sampler_correction(patch: Patch) -> None:
    """The sampling policy is taken for the trained one."""
    patch.setattr(losses, "sampler_weights", lambda old, *_: torch.ones_like(old))


def temperature_off(patch: Patch) -> None:
    """The temperature is 0.79 in place of 0.80."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda *args, temperature, **rest: right(*args, temperature=temperature * 0.79 / 0.80, **rest),
    )


def logits_in_bfloat16(patch: Patch) -> None:
    """Log-probs come from logits rounded to half precision."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda logits, *args, **rest: right(logits.bfloat16().to(logits.dtype), *args, **rest),
    )


def old_in_bfloat16(patch: Patch) -> None:
    """Recorded log-probs are rounded to half precision."""
    right: Any = importance_ratio
    patch.setattr(
        losses,
        "importance_ratio",
        lambda new, old, *rest: right(new, old.bfloat16().to(old.dtype), *rest),
    )


@torch.no_grad()
def stale_weight(run: Run) -> None:
    """One matrix is off by 2 %."""
    found = [p for name, p in run.trainer.policy.named_parameters() if p.ndim == 2 and "embed" not in name]
    found[-1].mul_(1.02)


@torch.no_grad()
def weights_in_half_precision(run: Run) -> None:
    """Weights are rounded to float16 on their way to the trainer."""
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(parameter.half().to(parameter.dtype))


def products_in_tensorfloat32(run: Run) -> None:
    """Inputs of the linear layers lose 13 bits of their mantissa."""

    def rounded(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        mantissa, exponent = torch.frexp(args[0])
        return (torch.ldexp((mantissa * 2048).round() / 2048, exponent), *args[1:])

    for name, module in run.trainer.policy.model.named_modules():
        if name.endswith(("_proj", "c_attn", "c_fc")):
            module.register_forward_pre_hook(rounded)
