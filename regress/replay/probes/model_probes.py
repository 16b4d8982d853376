"""Probes of the forward pass: inputs, log-probs, layers, adapters, and the bits of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import causal_lm_policy, grpo_trainer, run_construction
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import LossTokens, Microbatch, TokenBatch
from regress.engine.run_construction import Run
from regress.errors import ReplayError
from regress.grpo import selective_log_softmax, token_losses
from regress.layout import RankLayout
from regress.replay.fault_injection import Patch, around, by, in_place_of
from regress.replay.probes import probe


@probe()
def adapter_in_the_reference(run: Run) -> None:
    """The reference is computed with the policy's adapter on."""
    reference = run.trainer.reference
    if reference is None or reference._adapter is None:
        raise ReplayError("there is no reference without an adapter")
    for name, parameter in run.trainer.policy.named_parameters():
        reference._adapter[name] = parameter.detach().clone()


@probe()
@torch.no_grad()
def factors_in_bfloat16(run: Run) -> None:
    """The factors are rounded to half precision on their way from the file."""
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(parameter.bfloat16().to(parameter.dtype))


@probe(variant="packed-dynamic")
@around(TokenBatch, "_project")
def columns_as_positions(project: Any, self: TokenBatch, place: RankLayout, *args: Any) -> Any:
    """Position ids count through the row, samples and padding alike, in the batch that is recorded."""
    micro = project(self, place, *args)
    layout = place.tokens
    columns = torch.arange(layout.shape[1]).expand(layout.shape)
    return replace(micro, position_ids=torch.where(torch.from_numpy(layout.attention_mask), columns, 0))


@probe(variant="reversed")
@in_place_of(Trainer, "_collected")
def order_not_restored(self: Trainer, source: LocalPolicy, micros: Sequence[Microbatch], count: int) -> Any:
    """Values of reordered microbatches are laid end to end instead of back in their places."""
    return torch.cat(source.log_probs(micros))


@probe()
@in_place_of(Trainer, "loss_masks")
def tool_tokens_in_the_loss(_: Any, samples: Any) -> Any:
    """Everything after the prompt is trained on."""
    return [[0] * t.prompt_length + [1] * (len(t.tokens) - t.prompt_length) for t in samples]


@probe(small=True)
@around(causal_lm_policy, "token_log_probs")
def logits_in_bfloat16(right: Any, logits: Any, *args: Any, **rest: Any) -> Any:
    """Log-probs come from logits rounded to half precision."""
    return right(logits.bfloat16().to(logits.dtype), *args, **rest)


@probe(small=True)
@around(token_losses, "importance_ratio")
def old_in_bfloat16(right: Any, new: Any, old: Any, *rest: Any) -> Any:
    """Recorded log-probs are rounded to half precision."""
    return right(new, old.bfloat16().to(old.dtype), *rest)


def rounded(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor with the bits of a narrower dtype, in its own; the gradient passes through."""
    return tensor + (tensor.detach().to(dtype).to(tensor.dtype) - tensor.detach())


@probe(small=True)
def products_in_tensorfloat32(run: Run) -> None:
    """Inputs of the linear layers lose 13 bits of their mantissa."""

    def rounded(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        mantissa, exponent = torch.frexp(args[0])
        return (torch.ldexp((mantissa * 2048).round() / 2048, exponent), *args[1:])

    for name, module in run.trainer.policy.model.named_modules():
        if name.endswith(("_proj", "c_attn", "c_fc")):
            module.register_forward_pre_hook(rounded)


@probe()
def rotary_in_bfloat16(run: Run) -> None:
    """Rotary frequencies are rounded to half precision."""
    buffers = [b for name, b in run.trainer.policy.model.named_buffers() if name.endswith("inv_freq")]
    if not buffers:
        raise ReplayError("there are no rotary positions")
    for buffer in buffers:
        buffer.copy_(buffer.bfloat16())


@probe(small=True)
@torch.no_grad()
def weights_in_half_precision(run: Run) -> None:
    """Weights are rounded to float16 on their way to the trainer."""
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(parameter.half().to(parameter.dtype))


@probe()
@around(causal_lm_policy, "logits_at")
def logits_one_late(right: Any, model: Any, index: Any, *rest: Any) -> Any:
    """The logits are those at a token, not those that predict it."""
    return right(model, index + 1, *rest)


@probe()
@in_place_of(token_losses, "sampler_weights")
def no_sampler_correction(old: Any, *_: Any) -> Any:
    """The sampling policy is taken for the trained one."""
    return torch.ones_like(old)


@probe()
def norm_epsilon(run: Run) -> None:
    """Every RMSNorm has ten times its epsilon."""
    norms: list[Any] = [m for m in run.trainer.policy.model.modules() if hasattr(m, "variance_epsilon")]
    if not norms:
        raise ReplayError("there is no RMSNorm")
    for norm in norms:
        norm.variance_epsilon *= 10


@probe()
@around(grpo_trainer, "train_step")
def old_is_current(
    right: Any, model: LocalPolicy, optimizer: Any, tokens: LossTokens, *args: Any, **rest: Any
) -> Any:
    """Old log-probs are recomputed after the first update, so that every ratio is 1."""
    return right(model, optimizer, replace(tokens, old_log_probs=None), *args, **rest)


@probe(small=True)
@in_place_of(run_construction, "build_reference")
def reference_is_the_policy(*_: Any) -> Any:
    return None


@probe(small=True)
@torch.no_grad()
def stale_weight(run: Run) -> None:
    """One matrix is off by 2 %."""
    found = [p for name, p in run.trainer.policy.named_parameters() if p.ndim == 2 and "embed" not in name]
    found[-1].mul_(1.02)


def in_logits_gradient(patch: Patch, change: Any) -> None:
    """Replace the gradient of the logits by ``change(right, logits, targets, stats, g, h, temperature, chunk)``."""
    right: Any = selective_log_softmax.logits_gradient
    patch.setattr(selective_log_softmax, "logits_gradient", lambda *args: change(right, *args))


@probe()
@by(in_logits_gradient)
def normalization_without_gradient(
    right: Any, logits: Tensor, targets: Tensor, stats: Any, g: Tensor, *rest: Any
) -> Any:
    """Log-sum-exp is detached, which leaves the gradient of the target's logit alone."""
    out = torch.zeros_like(logits)
    rows = torch.arange(len(targets), device=targets.device)
    out.view(len(targets), -1)[rows, targets] = (g.reshape(-1) / rest[1]).to(out.dtype)
    return out
