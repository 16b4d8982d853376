"""Components of somebody's own, right and wrong, which tests put in the place of the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from regress.grpo import token_losses
from regress.grpo.token_losses import TokenLoss


class OwnNorm(nn.Module):
    """RMSNorm by another order of operations."""

    def __init__(self, old: nn.Module, power: float) -> None:
        super().__init__()
        self.weight = old.weight
        self.eps, self.power = old.variance_epsilon, power

    def forward(self, hidden: Tensor) -> Tensor:
        scale = (hidden.float().square().mean(-1, keepdim=True) + self.eps) ** self.power
        return self.weight * (hidden.float() * scale).to(hidden.dtype)


def norm(model: Any) -> None:
    """Right."""
    _exchange(model, -0.5)


def wrong_norm(model: Any) -> None:
    """Another exponent."""
    _exchange(model, -0.499)


def _exchange(model: nn.Module, power: float) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, OwnNorm(module, power))


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Right: softmax written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (rest.get("scaling") or query.shape[-1] ** -0.5)
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def unpacked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Right where every row begins with one sample, since it looks at no mask: wrong for packed rows."""
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=rest.get("scaling"), enable_gqa=gqa
    )
    return out.transpose(1, 2), None


def loss(*args: Any, **named: Any) -> TokenLoss:
    """Right: the engine's."""
    return token_losses.token_loss(*args, **named)


def local_loss(*args: Any, **named: Any) -> TokenLoss:
    """Scaled by the number of samples that it sees: right for one microbatch of all 12 alone."""
    found = token_losses.token_loss(*args, **named)
    return TokenLoss(**{**vars(found), "loss_K": found.loss_K * (args[4] / 12)})


def no_loss(*args: Any, **named: Any) -> Tensor:
    """Returns what no loss function may."""
    return token_losses.token_loss(*args, **named).loss_K


class OwnAdamW(torch.optim.Optimizer):
    """AdamW written out."""

    def __init__(self, named: Any, lr: float, **settings: Any) -> None:
        super().__init__([parameter for _, parameter in named], {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                state["step"] += 1
                t = float(state["step"])
                state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).add_(p.grad.square(), alpha=1 - b2)
                p.mul_(1 - lr * group["weight_decay"])
                root = (state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
                p.sub_(lr * state["exp_avg"] / (1 - b1**t) / root)


def adamw(named: Any, lr: float, *, betas: tuple[float, float], eps: float, weight_decay: float) -> OwnAdamW:
    """Right."""
    return OwnAdamW(named, lr, betas=betas, eps=eps, weight_decay=weight_decay)


def forgetful(named: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Leaves a parameter out."""
    return torch.optim.AdamW([parameter for _, parameter in named[1:]], lr=lr)


def wrapper(model: nn.Module, group: Any) -> nn.Module:
    """Right: torch's."""
    return DistributedDataParallel(model, process_group=group)


class Deaf(nn.Module):
    """A wrapper that exchanges nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)

    def no_sync(self) -> Any:
        return torch.enable_grad()


def deaf(model: nn.Module, group: Any) -> nn.Module:
    """Wrong on two ranks."""
    return Deaf(model)
