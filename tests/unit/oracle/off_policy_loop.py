"""A loop of plain PyTorch that trains off policy: many ratios lie near the bounds of the clip range."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from regress import Trajectory, at, record, tap_batch, tap_trajectories

LENGTHS = ((3, 72), (3, 90), (3, 54), (3, 81), (4, 69), (4, 78), (4, 63), (4, 72))
SPREAD = 0.15
"""Standard deviation of the log-ratios."""


def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model: PreTrainedModel = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=64, initializer_range=0.15, **sizes, **heads, **special)
    )
    return model


def tiny_mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model: PreTrainedModel = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=64, initializer_range=0.15, **sizes, **heads, **experts, **special)
    )
    return model


def rollout() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, (prompt, completion) in enumerate(LENGTHS):
        tokens = torch.randint(2, 64, (prompt + completion,), generator=generator).tolist()
        tokens[:prompt] = [2 + number // 4] * prompt
        mask = [0] * prompt + [1] * completion
        found.append(Trajectory(str(number // 4), number % 4, tokens, mask, float(number % 3), prompt))
    return found


def padded(samples: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, loss mask and attention mask, ``[B, T]``."""
    width = max(len(sample.tokens) for sample in samples)
    ids, mask, attention = (
        torch.tensor([row + [0] * (width - len(row)) for row in rows])
        for rows in (
            [sample.tokens for sample in samples],
            [sample.loss_mask for sample in samples],
            [[1] * len(sample.tokens) for sample in samples],
        )
    )
    return ids, mask, attention


def log_probs(
    model: PreTrainedModel, ids: torch.Tensor, attention: torch.Tensor, autocast: bool
) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def spread(now: torch.Tensor) -> torch.Tensor:
    """Return old log-probs beside these, with noise."""
    return now + SPREAD * torch.randn(now.shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def straddled(model: PreTrainedModel, count: int = 4) -> torch.Tensor:
    """Return old log-probs so that a bound of the clip range lies between the ratios in float32 and in bfloat16.

    Args:
        count: such tokens of a sample with a positive advantage, and as many of one with a negative one.
    """
    ids, mask, attention = padded(rollout())
    fine, coarse = (log_probs(model, ids, attention, autocast) for autocast in (False, True))
    old, gap = spread(fine), (fine - coarse).abs() * mask[:, 1:]
    for row, bound in ((2, 1.2), (0, 0.8)):  # the best sample of the first group, and the worst
        places = gap[row].topk(count).indices
        middle = (fine[row, places] + coarse[row, places]) / 2
        old[row, places] = middle - torch.tensor(bound).log()
    return old


def train(
    folder: Path,
    *,
    autocast: bool = False,
    clip: tuple[float, float] = (0.8, 1.2),
    old: torch.Tensor | None = None,
    dropped: int | None = None,
    balance: float = 0.0,
    kl: float = 0.0,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> torch.Tensor:
    """Make an update with a token mean; return the old log-probs.

    Args:
        old: log-probs in the denominators of the ratios; by default those of the model with noise.
        dropped: number of a loss token whose gradient is lost.
        balance: coefficient of the load-balancing loss of a mixture.
        kl: coefficient of the estimate k3 of the KL divergence from the old log-probs, with noise, as the reference.
        options: those of `record`.
    """
    model, samples = model or tiny_model(), rollout()
    balanced: list[torch.Tensor] = []
    if balance:
        model.config.output_router_logits = True
        model.register_forward_hook(lambda _, __, output: balanced.append(output.aux_loss))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewards = torch.tensor([sample.reward for sample in samples]).reshape(2, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).reshape(-1)
    ids, mask, attention = padded(samples)
    with record(folder, model, token_gradient=True, initial_weights=True, **options):
        with at(step=0):
            tap_trajectories(samples)
        now = log_probs(model, ids, attention, autocast)
        if old is None:
            old = spread(now.detach())
        known = {"old_log_probs": old, **({"ref_log_probs": spread(old)} if kl else {})}
        aligned = {name: torch.nn.functional.pad(values, (1, 0)) for name, values in known.items()}
        tap_batch(advantages=advantages, loss_mask=mask, **aligned)
        ratio, advantage = (now - old).exp(), advantages[:, None]
        kept = mask[:, 1:].clone()
        if dropped is not None:
            kept.view(-1)[kept.view(-1).nonzero()[dropped]] = 0
        loss = torch.minimum(ratio * advantage, ratio.clamp(*clip) * advantage) * kept
        if kl:
            way = known["ref_log_probs"] - now
            loss = loss - kl * (way.exp() - way - 1) * kept
        (-loss.sum() / mask.sum() + balance * sum(balanced)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return old
