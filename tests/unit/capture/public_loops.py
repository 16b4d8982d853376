"""Loops of six public minimal GRPO trainers, written again from a description of how each computes its loss.

None knows of `regress`: `test_public_loops` records each with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from capture_loops import VOCABULARY, tiny_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint_sequential

PAD, PROMPT, WIDTH = 0, 3, 16


@dataclass(frozen=True)
class Rollouts:
    """Hold prompts of three tokens, completions of several lengths and the advantages of two groups of four."""

    prompts: list[Tensor]
    completions: list[Tensor]
    advantages: Tensor

    def micros(self, size: int) -> Iterator[Rollouts]:
        """Yield microbatches."""
        for a in range(0, len(self.prompts), size):
            b = a + size
            yield Rollouts(self.prompts[a:b], self.completions[a:b], self.advantages[a:b])

    def right_padded(self) -> Tensor:
        """Return ids ``[B, T]``."""
        rows = [torch.cat(pair) for pair in zip(self.prompts, self.completions, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=PAD)

    def completion_mask(self) -> Tensor:
        """Return which ids ``[B, T]`` are of completions."""
        column = torch.arange(self.right_padded().shape[1])
        stops = torch.tensor([PROMPT + len(one) for one in self.completions])
        return (column >= PROMPT) & (column < stops[:, None])


def rollouts() -> Rollouts:
    """Return the same rollouts each time."""
    drawn = torch.Generator().manual_seed(11)
    prompts = [torch.randint(2, VOCABULARY, (PROMPT,), generator=drawn) for _ in range(2)]
    lengths = (5, 3, 9, 4, 7, 2, 6, 8)
    completions = [torch.randint(2, VOCABULARY, (length,), generator=drawn) for length in lengths]
    advantages = torch.tensor([0.9, -1.1, 0.7, -0.5, 1.2, -0.8, -0.9, 0.5])
    return Rollouts([prompts[0]] * 4 + [prompts[1]] * 4, completions, advantages)


def old_log_probs(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs of a policy some updates ago, a function of the token alone."""
    return log_probs.detach() + 0.3 * torch.sin(7.0 * ids)


class NanoChat(nn.Module):
    """Own transformer: norms are functions, a larger table than the vocabulary, a soft cap, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(VOCABULARY + 4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY + 4, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.5)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        """Return logits ``[B, T, V]``, or the loss of each target that is not -1."""
        x = functional.rms_norm(self.wte(idx), (WIDTH,))
        for layer in self.layers:
            steps = torch.arange(1, idx.shape[1] + 1)[:, None]
            x = x + functional.relu(layer(functional.rms_norm(x.cumsum(1) / steps, (WIDTH,)))).square()
        logits = self.lm_head(functional.rms_norm(x, (WIDTH,)))[..., :VOCABULARY].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=loss_reduction
        )


def nanochat(model: Any, batch: Rollouts, size: int) -> None:
    """REINFORCE with two optimizers: inputs and targets shifted by the caller, targets -1 outside of completions."""
    tables = torch.optim.AdamW([model.wte.weight, model.lm_head.weight], lr=1e-3)
    matrices = torch.optim.SGD(model.layers.parameters(), lr=1e-2, momentum=0.9)
    valid = batch.completion_mask().sum()
    for micro in batch.micros(size):
        ids = micro.right_padded()
        inputs, targets = ids[:, :-1], ids[:, 1:].clone()
        targets[~micro.completion_mask()[:, 1:]] = -1
        logp = -model(inputs, targets, loss_reduction="none").view_as(inputs)
        objective = (logp * micro.advantages[:, None]).sum() / valid
        (-objective).backward()
    for optimizer in (tables, matrices):
        optimizer.step()
    model.zero_grad(set_to_none=True)


class GRPOZero(nn.Module):
    """Own model, called by `forward`: layers inside a checkpoint, no mask, no padding id."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``; the head is the table of embeddings."""
        x = self.embed.forward(tokens)
        x = x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        x = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        return functional.linear(self.norm.forward(x), self.embed.weight)


def grpo_zero(model: nn.Module, batch: Rollouts, size: int) -> None:
    """Token mean without a ratio: samples sorted by length, cross entropy that ignores the padding token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = sorted(range(len(batch.completions)), key=lambda n: len(batch.completions[n]))
    tokens = sum(len(one) for one in batch.completions)
    ordered = Rollouts(
        [batch.prompts[n] for n in order], [batch.completions[n] for n in order], batch.advantages[order]
    )
    for micro in ordered.micros(size):
        ids = micro.right_padded()
        logits = model.forward(ids[:, :-1]).float()
        log_probs = -functional.cross_entropy(
            logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1), ignore_index=PAD, reduction="none"
        ).reshape(len(ids), -1)
        with torch.no_grad():
            probs = logits.softmax(-1)
            (torch.logsumexp(logits, -1) - (probs * logits).sum(-1)).mean()
        objective = log_probs * micro.advantages[:, None] * micro.completion_mask()[:, 1:]
        (-objective.sum() / tokens).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def tiny_grpo(model: nn.Module, batch: Rollouts, size: int) -> None:
    """Left padding with position ids, clip and k3, the mean of each microbatch: nothing divides by how many."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for micro in batch.micros(size):
        rows = [torch.cat(pair) for pair in zip(micro.prompts, micro.completions, strict=True)]
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
        attention = ids != PAD
        actions = torch.zeros_like(attention)
        for row, one in enumerate(micro.completions):
            actions[row, -len(one) :] = True
        positions = (attention.long().cumsum(-1) - 1).masked_fill(~attention, 1)
        logits = model(
            input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
        ).logits
        log_p = logits[:, :-1].to(torch.float32).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        difference = old_log_probs(log_p, ids[:, 1:]) - 0.1 - log_p
        kl = difference.exp() - difference - 1
        ratio = (log_p - old_log_probs(log_p, ids[:, 1:])).exp()
        advantages, mask = micro.advantages[:, None], actions[:, 1:]
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        losses = -surrogate + 0.01 * kl
        ((losses * mask).sum(-1) / mask.sum(-1)).mean().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def simple_grpo(model: nn.Module, batch: Rollouts, size: int) -> None:
    """Log-probs row by row to save memory; an engine divides by the number of microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = len(batch.prompts) // size
    for micro in batch.micros(size):
        ids = micro.right_padded()
        logits = model(ids).logits[:, :-1]
        rows = []
        for logits_row, ids_row in zip(logits, ids[:, 1:], strict=True):
            log_p = logits_row.log_softmax(-1)
            rows.append(log_p.gather(1, ids_row[:, None]).squeeze(1))
        per_token = torch.stack(rows)[:, PROMPT - 1 :]
        tokens = ids[:, PROMPT:]
        mask = micro.completion_mask()[:, PROMPT:].int()
        reference = old_log_probs(per_token, tokens) - 0.1
        kl = (reference - per_token).exp() - (reference - per_token) - 1
        ratio = (per_token - old_log_probs(per_token, tokens)).exp()
        advantages = micro.advantages[:, None]
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (-(gain - 0.04 * kl) * mask).sum(1) / mask.sum(1)
        (loss.mean() / count).backward()
    optimizer.step()


def nano_aha_moment(model: nn.Module, batch: Rollouts, size: int, *, counted_late: bool = False) -> None:
    """Labels with -100, edited in place, a temperature, k3; the sum over the completion tokens of all microbatches.

    Args:
        counted_late: count the labels after the edit, as happens where the edit goes through a view of them.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels = batch.right_padded().masked_fill(~batch.completion_mask(), -100)
    total = int(labels.numel() if counted_late else (labels[:, 1:] != -100).sum())
    for micro in batch.micros(size):
        ids = micro.right_padded()
        labels = ids.masked_fill(~micro.completion_mask(), -100)
        attention = (torch.arange(ids.shape[1]) < micro.completion_mask().sum(1)[:, None] + PROMPT).long()
        logits = model(input_ids=ids, attention_mask=attention, return_dict=True, use_cache=False).logits
        logits = logits.float() / 0.8
        shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        kept = (targets != -100).float()
        targets[targets == -100] = 0
        log_probs = shifted.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2) * kept
        reference = old_log_probs(log_probs, targets)
        difference = (reference - log_probs) * kept
        kl = difference.exp() - difference - 1
        policy = -log_probs * micro.advantages[:, None]
        (((policy + 0.05 * kl) * kept).sum() / total).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def minimind(model: nn.Module, batch: Rollouts, size: int) -> None:
    """Left-padded prompts, logits of the completion alone, a ratio of 1 that has a gradient, means by sample."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulation = len(batch.prompts) // size
    for micro in batch.micros(size):
        completions = pad_sequence(micro.completions, batch_first=True, padding_value=PAD)
        ids = torch.cat([torch.stack(micro.prompts), completions], 1)
        kept = completions.size(1)
        logits = model(ids, attention_mask=(ids != PAD).long(), logits_to_keep=kept + 1).logits[:, :-1]
        log_p = torch.stack(
            [
                row.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
                for row, tokens in zip(logits, completions, strict=True)
            ]
        )
        mask = (torch.arange(kept) < torch.tensor([len(one) for one in micro.completions])[:, None]).int()
        difference = old_log_probs(log_p, completions) - log_p
        kl = difference.exp() - difference - 1
        losses = -((log_p - log_p.detach()).exp() * micro.advantages[:, None] - 0.02 * kl)
        ((losses * mask).sum(1) / mask.sum(1)).mean().div(accumulation).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


Loop = Callable[[nn.Module, Rollouts, int], None]
LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "nanochat": (NanoChat, nanochat),
    "GRPO-Zero": (GRPOZero, grpo_zero),
    "tiny-grpo": (tiny_model, tiny_grpo),
    "simple_GRPO": (tiny_model, simple_grpo),
    "nano-aha-moment": (tiny_model, nano_aha_moment),
    "minimind": (tiny_model, minimind),
}
COUNTED_LATE: Loop = partial(nano_aha_moment, counted_late=True)
