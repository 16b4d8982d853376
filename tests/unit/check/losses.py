"""Loss functions as trainers write them, right ones, and right ones with one thing wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def paper(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    beta: float = 0.04,
    epsilon: float = 0.2,
) -> Tensor:
    """Equation 3 of DeepSeekMath, a value of the advantage for each sample."""
    ratio, a = torch.exp(logps - old_logps), advantages.unsqueeze(1)
    policy = -torch.min(ratio * a, torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * a)
    x = ref_logps - logps
    loss = policy + beta * (torch.exp(x) - x - 1)
    return ((loss * completion_mask).sum(1) / completion_mask.sum(1).clamp(min=1)).mean()


def named_otherwise(pi: Tensor, mu: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Names that say nothing."""
    return dapo(pi, mu, w, m)


def dapo(logprobs: Tensor, old_logprobs: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """Constants in the code."""
    r = (logprobs - old_logprobs).exp()
    return (-torch.min(r * adv, r.clamp(0.8, 1.28) * adv) * mask).sum() / mask.sum()


def verl_style(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """The loss and the share of clipped tokens; a boolean mask is inverted."""
    low, high = cliprange_low or cliprange, cliprange_high or cliprange
    kl = torch.clamp(log_prob - old_log_prob, -20.0, 20.0)
    ratio = torch.exp(kl)
    one, two = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clipped = torch.maximum(one, two)
    dual = torch.min(-advantages * clip_ratio_c, clipped)
    loss = torch.where(advantages < 0, dual, clipped).masked_fill(~response_mask, 0.0)
    return loss.sum() / response_mask.sum(), (two > one).double().mean()


def with_denominator(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    num_items_in_batch: int,
    eps_clip: float,
    eps_clip_high: float,
) -> dict[str, Tensor]:
    """A mapping, and the tokens of the whole batch as the denominator."""
    r = torch.exp(log_probs - old_log_probs)
    loss = -torch.min(r * advantages, r.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages)
    return {"clipped": (r > 1).sum(), "loss": (loss * loss_mask).sum() / num_items_in_batch}


def packed(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, cu_seqlens: Tensor, clip_eps: float
) -> Tensor:
    """Loss tokens alone, with the boundaries of samples."""
    r = torch.exp(log_probs - old_log_probs)
    loss = -torch.min(r * advantages, r.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    parts = [loss[a:b].mean() for a, b in pairwise(cu_seqlens) if b > a]
    return torch.stack(parts).sum() / (len(cu_seqlens) - 1)


def token_losses(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """No aggregation."""
    r = torch.exp(new_logprobs - old_logprobs)
    return -torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages) * loss_mask


def from_rewards(
    logps: Tensor, old_logps: Tensor, rewards: Tensor, group_ids: Tensor, mask: Tensor, ddof: int = 1
) -> Tensor:
    """Advantages of its own."""
    a = torch.zeros_like(rewards)
    for group in group_ids.unique():
        own = rewards[group_ids == group]
        a[group_ids == group] = (own - own.mean()) / (own.std(correction=ddof) + 1e-6)
    r = torch.exp(logps - old_logps)
    loss = -torch.min(r * a[:, None], r.clamp(0.8, 1.2) * a[:, None])
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


class Module(torch.nn.Module):
    """A loss as a module."""

    def forward(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        """Return an object with the loss."""

        @dataclass
        class Output:
            loss: Tensor

        return Output(dapo(logps, old_logps, advantages, mask))


MODULE = Module()


def single(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Float32 inside."""
    return dapo(logps.float(), old_logps.float(), advantages.float(), mask.float())


def sequence_ratio(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """GSPO."""
    count = mask.sum(1).clamp(min=1)
    r = torch.exp(((logps - old_logps) * mask).sum(1) / count)
    loss = -torch.min(r * advantages, r.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    return loss.mean()


def minimax(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """CISPO."""
    r = torch.exp(logps - old_logps).detach().clamp(max=5.0)
    return -(r * advantages * logps * mask).sum() / mask.sum()


def faulty(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    beta: float,
    epsilon: float,
    fault: str = "",
) -> Tensor:
    """`paper`, with a value of the advantage for each token, and one thing wrong."""
    a = advantages
    if fault == "mask off by one":
        mask = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    if fault == "no mask":
        mask = torch.ones_like(mask)
    if fault == "advantages of another sample":
        a = a.roll(1, 0)
    if fault == "whitened again":
        known = a[mask != 0]
        a = (a - known.mean()) / (known.std() + 1e-8)
    if fault == "sign":
        a = -a
    old = logps.detach() if fault == "no old log-probs" else old_logps
    if fault == "reference for old":
        old = ref_logps
    ratio = torch.exp(logps - old)
    if fault == "log-ratio reversed":
        ratio = torch.exp(old - logps)
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    policy = -torch.min(ratio * a, clipped * a)
    if fault == "no clip":
        policy = -ratio * a
    if fault == "clip alone":
        policy = -clipped * a
    if fault == "maximum":
        policy = -torch.max(ratio * a, clipped * a)
    if fault == "minimum first":
        policy = -torch.min(ratio, clipped) * a
    if fault == "a narrower clip":
        policy = -torch.min(ratio * a, torch.clamp(ratio, 1 - 0.05, 1 + 0.05) * a)
    x = ref_logps - logps
    kl = {
        "k1": -x,
        "k2": x**2 / 2,
        "k3 reversed": torch.exp(-x) + x - 1,
        "squared without half": x**2,
    }.get(fault, torch.exp(x) - x - 1)
    if fault == "kl detached":
        kl = kl.detach()
    if fault == "no kl":
        beta = 0.0
    if fault == "twice the kl":
        beta = 2 * beta
    loss = policy - beta * kl if fault == "kl sign" else policy + beta * kl
    if fault == "kl of all tokens":
        return (policy * mask).sum(1).div(mask.sum(1).clamp(min=1)).mean() + beta * kl.mean()
    loss = loss * mask
    count = mask.sum(1).clamp(min=1)
    if fault == "token mean":
        return loss.sum() / mask.sum()
    if fault == "mean of all places":
        return loss.mean()
    if fault == "longest completion":
        return (loss.sum(1) / mask.shape[1]).mean()
    if fault == "sum":
        return loss.sum()
    if fault == "sum of samples":
        return (loss.sum(1) / count).sum()
    if fault == "empty samples left out":
        return (loss.sum(1) / count)[mask.sum(1) > 0].mean()
    if fault == "divided by four":
        return (loss.sum(1) / count).mean() / 4
    if fault == "an empty sample is NaN":
        return (loss.sum(1) / mask.sum(1)).mean()
    if fault == "detached":
        return (loss.sum(1) / count).mean().detach()
    if fault == "first token left out":
        return ((loss * (mask.cumsum(1) > 1)).sum(1) / (count - 1).clamp(min=1)).mean()
    if fault == "ratio of the mean":
        own = torch.exp(((logps - old) * mask).sum(1) / count)[:, None].expand_as(logps)
        policy = -torch.min(own * a, own.clamp(1 - epsilon, 1 + epsilon) * a)
        return (((policy + beta * kl) * mask).sum(1) / count).mean()
    if fault == "two":
        return ((policy + beta * -x) * mask).sum() / mask.sum()
    return (loss.sum(1) / count).mean()
