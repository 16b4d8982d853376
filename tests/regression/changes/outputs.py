"""Changes of log-probs and entropies, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import causal_lm_policy
from regress.grpo import token_losses
from regress.replay.fault_injection import Patch
from regress.replay.probes.loss_probes import before_backward, in_policy_loss, valued
from regress.replay.probes.model_probes import in_logits_gradient
from tests.regression.changes.change import Change

# log-probs and entropies


def in_log_probs(patch: Patch, change: Callable[..., Any]) -> None:
    right: Any = causal_lm_policy.token_log_probs
    patch.setattr(causal_lm_policy, "token_log_probs", lambda *args, **rest: change(right, *args, **rest))


def logits_in_float16(patch: Patch) -> None:
    in_log_probs(patch, lambda right, z, *a, **r: right(z.half().to(z.dtype), *a, **r))


def temperature_twice(patch: Patch) -> None:
    in_log_probs(patch, lambda right, *a, temperature, **r: right(*a, temperature=temperature**2, **r))


def logits_capped(patch: Patch) -> None:
    in_log_probs(patch, lambda right, z, *a, **r: right(2.0 * torch.tanh(z / 2.0), *a, **r))


def log_probs_floored(patch: Patch) -> None:
    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, log_probs=found.log_probs.clamp(min=-1.0))

    in_log_probs(patch, wrong)


def labels_smoothed(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, *, temperature: float = 1.0, **rest: Any) -> Any:
        found = right(z, targets, temperature=temperature, **rest)
        mean = torch.log_softmax(z / temperature, -1).mean(-1)
        return replace(found, log_probs=0.9 * found.log_probs + 0.1 * mean)

    in_log_probs(patch, wrong)


def entropy_in_bits(patch: Patch) -> None:
    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return found if found.entropy is None else replace(found, entropy=found.entropy / 0.6931471805599453)

    in_log_probs(patch, wrong)


# the way back


def entropy_gradient_not_centred(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, stats: Any, g: Tensor, h: Any, t: float, c: int) -> Any:
        out = right(z, targets, stats, g, None, t, c)
        if h is None:
            return out
        log_p = torch.log_softmax(z / t, -1)
        return out - (h[..., None] / t) * log_p.exp() * log_p

    in_logits_gradient(patch, wrong)


def target_gradient_doubled(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, stats: Any, g: Tensor, h: Any, t: float, c: int) -> Any:
        out = right(z, targets, stats, g, h, t, c)
        rows = torch.arange(targets.numel())
        out.view(targets.numel(), -1)[rows, targets.reshape(-1)] += g.reshape(-1) / t
        return out

    in_logits_gradient(patch, wrong)


def kl_gradient_halved(patch: Patch) -> None:
    right: Any = token_losses.kl_estimate

    def wrong(*args: Any) -> Tensor:
        value = right(*args)
        return valued(value, 0.5 * value)

    patch.setattr(token_losses, "kl_estimate", wrong)


def policy_gradient_doubled(patch: Patch) -> None:
    def wrong(right: Any, *args: Any) -> Tensor:
        value = right(*args)
        return valued(value, 2.0 * value)

    in_policy_loss(patch, wrong)


def last_microbatch_halved(patch: Patch) -> None:
    before_backward(patch, lambda share, number: share * (0.5 if number == 2 else 1.0))


CHANGES = (
    Change(logits_in_float16, "dense", ("softmax-dtype", "log-softmax")),
    Change(temperature_twice, "dr_grpo", ("temperature",)),
    Change(logits_capped, "dense", ("log-softmax",)),
    Change(log_probs_floored, "dense", ("log-softmax",)),
    Change(labels_smoothed, "dense", ("log-softmax",)),
    Change(entropy_in_bits, "dr_grpo", ("logarithm",)),
    Change(entropy_gradient_not_centred, "dr_grpo", ("entropy-backward",)),
    Change(target_gradient_doubled, "dense", ("log-softmax-backward",)),
    Change(kl_gradient_halved, "dense", ("kl-gradient",)),
    Change(policy_gradient_doubled, "dense", ("policy-gradient-scale",)),
    Change(last_microbatch_halved, "dense", ("token-gradient-denominators", "token-gradient-power-of-two")),
)
