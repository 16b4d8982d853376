"""A plain training loop under test: a tiny model, samples of unequal length, and every way to lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress import record
from regress.compare.dumps.comparison import Comparison, compare_dumps

VOCABULARY = 40


def tiny_model(**changes: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with the same random weights every time."""
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.35,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**config, **changes}))


def make_samples(count: int = 8, seed: int = 1) -> list[Tensor]:
    """Token ids of samples of 3 to 11 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor], side: str = "right") -> dict[str, Tensor]:
    """One sample a row."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[number, place], mask[number, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def packed(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """All samples in one row, position ids restarted."""
    return {
        "input_ids": torch.cat(list(rows))[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }


def batch(rows: Sequence[Tensor], layout: str) -> dict[str, Tensor]:
    """Rows in the layout ``right``, ``left`` or ``packed``."""
    return packed(rows) if layout == "packed" else padded(rows, layout)


def loss_mask(inputs: dict[str, Tensor]) -> Tensor:
    """``[B, T - 1]`` targets that count: the next token of the same sample."""
    if "attention_mask" in inputs:
        return (inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]).bool()
    return inputs["position_ids"][:, 1:] > 0


def token_losses(logits: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``[B, T - 1]`` weighted negative log-probs, and which of them count."""
    targets = inputs["input_ids"][:, 1:]
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -log_probs * (1 + targets % 3), loss_mask(inputs)


class FusedLogProbs(torch.autograd.Function):
    """Log-probs of a head whose logits nobody sees, as fused linear losses compute them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return the log-prob ``[N]`` of each target under ``softmax(hidden weight^T / temperature)``."""
        log_p = (hidden @ weight.T / temperature).log_softmax(-1)
        ctx.save_for_backward(hidden, weight, targets, log_p)
        ctx.temperature = temperature
        return log_p.gather(-1, targets[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the derivatives by hidden states and weight."""
        hidden, weight, targets, log_p = ctx.saved_tensors
        rest = -log_p.exp()
        rest[torch.arange(len(targets)), targets] += 1
        rest *= gradients[0][:, None] / ctx.temperature
        return rest @ weight, rest.T @ hidden, None, None


Loss = Callable[[Tensor, dict[str, Tensor], int], Tensor]


def mean_loss(logits: Tensor, inputs: dict[str, Tensor], total: int) -> Tensor:
    """Sum of the token losses over the number of loss tokens in the whole batch."""
    losses, mask = token_losses(logits, inputs)
    return (losses * mask).sum() / total


def steps(
    model: nn.Module,
    layout: str = "right",
    accumulation: int = 1,
    *,
    updates: int = 2,
    loss: Loss = mean_loss,
    clip: float | None = 0.1,
    samples: Sequence[Tensor] | None = None,
) -> Iterator[int]:
    """Train; yields before each update."""
    rows = list(samples or make_samples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    total = sum(len(row) - 1 for row in rows)
    size = len(rows) // accumulation
    for update in range(updates):
        yield update
        optimizer.zero_grad()
        for start in range(0, len(rows), size):
            inputs = batch(rows[start : start + size], layout)
            loss(model(**inputs).logits, inputs, total).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def recorded(folder: Path, model: nn.Module | None = None, *, options: Any = None, **how: Any) -> nn.Module:
    """Train under `record` into a folder."""
    model = tiny_model() if model is None else model
    with record(folder, model, **(options or {})):
        for _ in steps(model, **how):
            pass
    return model


def compare(golden: Path, actual: Path) -> Comparison:
    """Judge two dumps as `regress compare` does."""
    return compare_dumps(str(golden), str(actual))


def failed(report: Comparison) -> dict[str, str]:
    """Quantity -> detail of its first failure, in the order of computation."""
    found: dict[str, str] = {}
    for verdict in report.failed:
        where = "" if verdict.worst is None else verdict.worst.where
        found.setdefault(verdict.quantity, f"{verdict.name}: {verdict.detail} {where}".strip())
    return found
