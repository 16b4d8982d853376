"""A GRPO loop of plain PyTorch, recorded with all that `regress oracle` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from regress import Trajectory, at, record, tap_batch, tap_trajectories

LENGTHS = ((3, 4), (3, 6), (3, 2), (3, 5), (4, 3), (4, 6), (4, 1), (4, 4))
"""Tokens of prompt and completion of each sample: two groups of four."""
MAX_NORM = 0.5


def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model: PreTrainedModel = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=24, initializer_range=0.3, **sizes, **heads, **special)
    )
    return model


def rollout(step: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for number, (prompt, completion) in enumerate(LENGTHS):
        tokens = torch.randint(2, 24, (prompt + completion,), generator=generator).tolist()
        tokens[:prompt] = [2 + number // 4] * prompt
        reward = float(torch.randint(0, 5, (1,), generator=generator))
        mask = [0] * prompt + [1] * completion
        found.append(Trajectory(str(number // 4), number % 4, tokens, mask, reward, prompt))
    return found


def advantages_of(samples: list[Trajectory], ddof: int = 1) -> torch.Tensor:
    rewards = torch.tensor([sample.reward for sample in samples]).reshape(2, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True, correction=ddof) + 1e-6)).reshape(-1)


def train(
    folder: Path,
    *,
    updates: int = 2,
    size: int = 3,
    told: Iterable[str] = ("rewards",),
    ddof: int = 1,
    order: Iterable[int] | None = None,
    repeated: bool = False,
    entropy: float = 0.0,
    before: int = 0,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> None:
    """Make updates with a token mean; ``told`` says what is tapped: rewards, advantages, mask.

    ``before`` is a number of updates that are made, with gradients of 1, and not recorded.

    ``order`` is that of the rows, ``repeated`` adds a copy of the last one that the loss leaves out.
    """
    model = model or tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(before):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    with record(folder, model, token_gradient=True, **{"initial_weights": True, **options}):
        for step in range(updates):
            samples = rollout(step)
            if "rewards" in told:
                with at(step=step):
                    tap_trajectories(samples)
            advantages = advantages_of(samples, ddof)
            rows = list(order or range(8))
            counted = [True] * 8
            if repeated:
                rows, counted = [*rows, rows[-1]], [*counted, False]
            total = sum(sum(sample.loss_mask) for sample in samples)
            for first in range(0, len(rows), size):
                own = rows[first : first + size]
                _backward(
                    model,
                    [samples[i] for i in own],
                    advantages[own],
                    counted[first : first + size],
                    total,
                    told,
                    entropy,
                )
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def _backward(
    model: PreTrainedModel,
    samples: list[Trajectory],
    advantages: torch.Tensor,
    counted: list[bool],
    total: int,
    told: Iterable[str],
    entropy: float,
) -> None:
    width = max(len(sample.tokens) for sample in samples)
    pad: Callable[[list[int]], list[int]] = lambda row: row + [0] * (width - len(row))  # noqa: E731
    ids = torch.tensor([pad(sample.tokens) for sample in samples])
    mask = torch.tensor([pad(sample.loss_mask) for sample in samples]).float()
    attention = torch.tensor([pad([1] * len(sample.tokens)) for sample in samples])
    every = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    log_probs = every.gather(-1, ids[:, 1:, None])[..., 0]
    spread = -(every.exp() * every).sum(-1)
    tapped: dict[str, Any] = {"advantages": advantages} if "advantages" in told else {}
    tapped |= {"loss_mask": mask} if "mask" in told else {}
    if tapped:
        tap_batch(**tapped)
    used = mask[:, 1:] * torch.tensor(counted).float()[:, None]
    ratio = (log_probs - log_probs.detach()).exp()
    (-((ratio * advantages[:, None] + entropy * spread) * used).sum() / total).backward()
