"""Small GRPO trainers, each in another style: how logits become the log-probs of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from regress import record, tap_batch

VOCABULARY, HIDDEN, PAD = 48, 16, 0


class Block(nn.Module):
    """A causal mean of the tokens so far, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, H]`` to ``[B, T, H]``."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + torch.tanh(self.mix(x.cumsum(1) / count))


class Model(nn.Module):
    """A language model without any of the methods of transformers; its last norm is a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        nn.init.normal_(self.out.weight, std=0.4)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``."""
        logits: Tensor = self.out(functional.rms_norm(self.blocks(self.table(tokens)), (HIDDEN,)))
        return logits


class PastHooks(Model):
    """Modules called by their forward methods, layers inside a checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``."""
        x = checkpoint_sequential(self.blocks, 2, self.table.forward(tokens), use_reentrant=False)
        return self.out.forward(functional.rms_norm(x, (HIDDEN,)))


def gather(model: nn.Module, ids: Tensor) -> Tensor:
    """Gathered from `log_softmax`."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def shifted_inputs(model: nn.Module, ids: Tensor) -> Tensor:
    """Inputs lack the last column; cross entropy, negated."""
    logits = model(ids[:, :-1])
    flat = functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1), reduction="none")
    return -flat.view(len(ids), -1)


def soft_cap(model: nn.Module, ids: Tensor) -> Tensor:
    """A soft cap, a cropped vocabulary, float32."""
    capped = (15 * torch.tanh(model(ids[:, :-1])[..., :-4] / 15)).float()
    flat = functional.cross_entropy(capped.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -flat.view(len(ids), -1)


def logsumexp(model: nn.Module, ids: Tensor) -> Tensor:
    """A temperature, the tokens gathered from the logits, and row by row the log of the sum."""
    logits = model(ids)[:, :-1] / 0.7
    chosen = torch.gather(logits, dim=-1, index=ids[:, 1:, None]).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def chunks(model: nn.Module, ids: Tensor) -> Tensor:
    """A few rows of logits at once."""
    flat, targets = model(ids)[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)
    parts = [
        z.log_softmax(-1).gather(-1, t[:, None])[:, 0]
        for z, t in zip(flat.split(5), targets.split(5), strict=True)
    ]
    return torch.cat(parts).view(len(ids), -1)


def column_chunks(model: nn.Module, ids: Tensor) -> Tensor:
    """A few columns at once, cast."""
    pairs = zip(model(ids)[:, :-1].split(3, 1), ids[:, 1:].split(3, 1), strict=True)
    return torch.cat([z.float().log_softmax(-1).gather(-1, t[..., None])[..., 0] for z, t in pairs], 1)


def checkpointed(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs are computed again in the backward pass."""

    def log_probs(z: Tensor) -> Tensor:
        return z.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    found: Tensor = checkpoint(log_probs, model(ids)[:, :-1], use_reentrant=False)
    return found


class Fused(torch.autograd.Function):
    """A function of one's own over logits."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor) -> Tensor:
        """Return log-probs."""
        log_p = z.log_softmax(-1)
        ctx.save_for_backward(log_p, targets)
        return log_p.gather(-1, targets[..., None])[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by logits."""
        log_p, targets = ctx.saved_tensors
        d = -log_p.exp() * gradients[0][..., None]
        return d.scatter_add_(-1, targets[..., None], gradients[0][..., None]), None


def own_function(model: nn.Module, ids: Tensor) -> Tensor:
    """An own autograd function."""
    found: Tensor = Fused.apply(model(ids)[:, :-1], ids[:, 1:])
    return found


_compiled = torch.compile(
    lambda z, t: z.log_softmax(-1).gather(-1, t[..., None])[..., 0], backend="aot_eager"
)


def compiled(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs are compiled."""
    found: Tensor = _compiled(model(ids)[:, :-1], ids[:, 1:])
    return found


def softmax_log(model: nn.Module, ids: Tensor) -> Tensor:
    """The log of a probability."""
    return model(ids)[:, :-1].softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].log()


def categorical(model: nn.Module, ids: Tensor) -> Tensor:
    """A distribution."""
    found: Tensor = torch.distributions.Categorical(logits=model(ids)[:, :-1]).log_prob(ids[:, 1:])
    return found


def indexed(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs looked up by indices."""
    log_p = torch.log_softmax(model(ids)[:, :-1].reshape(-1, VOCABULARY), -1)
    return log_p[torch.arange(len(log_p)), ids[:, 1:].reshape(-1)].view(len(ids), -1)


def completions(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of the last columns alone; prompts are two tokens."""
    found = model(ids)[:, 1:-1].log_softmax(-1).gather(-1, ids[:, 2:, None])[..., 0]
    return torch.cat([torch.zeros_like(found[:, :1]), found], 1)


LogProbs = Callable[[nn.Module, Tensor], Tensor]
STYLES: dict[str, tuple[type[Model], LogProbs]] = {
    "gather": (Model, gather),
    "shifted inputs": (Model, shifted_inputs),
    "soft cap": (Model, soft_cap),
    "logsumexp": (Model, logsumexp),
    "chunks": (Model, chunks),
    "column chunks": (Model, column_chunks),
    "checkpoint": (Model, checkpointed),
    "own function": (Model, own_function),
    "compiled": (Model, compiled),
    "softmax log": (Model, softmax_log),
    "categorical": (Model, categorical),
    "indexed": (Model, indexed),
    "completions": (Model, completions),
    "past hooks": (PastHooks, gather),
}


def samples() -> list[Tensor]:
    """Prompts of two tokens and completions of one to eight, one of which samples the padding token."""
    drawn = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(1, VOCABULARY - 4, (length,), generator=drawn) for length in (7, 4, 10, 3, 6, 9, 5, 8)
    ]
    rows[2][5] = PAD
    return rows


ADVANTAGES = torch.tensor([0.9, -0.4, -1.1, 0.6, 1.2, -0.7, 0.0, 0.3])


@dataclass(frozen=True)
class Rows:
    """Hold a microbatch and its rollout: ids ``[B, T]``, mask ``[B, T - 1]``, advantages ``[B, 1]``."""

    ids: Tensor
    mask: Tensor
    advantages: Tensor
    tokens: int
    samples: int
    accumulation: int

    def advantages_of(self, fault: str) -> Tensor:
        """Return the advantages that the loss takes."""
        if fault == "population deviation":
            return self.advantages * (4 / 3) ** 0.5
        return self.advantages.roll(1, 0) if fault == "another sample" else self.advantages

    def other_policy(self, log_probs: Tensor, by: float) -> Tensor:
        """Return log-probs of another policy, which differ by token and place."""
        column = torch.arange(1, self.ids.shape[1])
        return log_probs.detach() + by * torch.sin(self.ids[:, 1:] * 7.0 + column)


def loss_of(log_probs: Tensor, rows: Rows, fault: str = "") -> Tensor:
    """DAPO with a KL term, and perhaps one thing wrong."""
    mask, a, tokens = rows.mask.to(log_probs.dtype), rows.advantages_of(fault), rows.tokens
    old, reference = rows.other_policy(log_probs, 0.4), rows.other_policy(log_probs, 0.3)
    if fault == "mask off by one":
        mask = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    if fault == "truncated rows counted":
        mask = mask * (rows.ids[:, -1:] == PAD)
    if fault == "no old log-probs":
        old = log_probs.detach()
    ratio = (log_probs - old).exp()
    policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    if fault == "no clip":
        policy = -ratio * a
    x = reference - log_probs
    kl = -x if fault == "KL k1" else x.exp() - x - 1
    loss = (policy + (-0.1 if fault == "KL sign" else 0.1) * kl) * mask
    if fault == "sequence mean":
        return (loss.sum(1) / mask.sum(1)).sum() / rows.samples
    if fault == "denominator of the microbatch":
        return loss.sum() / mask.sum() / rows.accumulation
    if fault == "constant denominator":
        return loss.sum() / 100
    if fault == "no division by accumulation":
        return loss.sum() / tokens * rows.accumulation
    return loss.sum() / tokens


class Divided(nn.Module):
    """A model whose logits a trainer divides."""

    def __init__(self, model: nn.Module, by: float) -> None:
        super().__init__()
        self.model, self.by = model, by

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, V]``."""
        logits: Tensor = self.model(tokens)
        return logits / self.by


def train(
    folder: Path,
    style: str,
    size: int,
    fault: str = "",
    *,
    updates: int = 1,
    tapped: bool = False,
    **options: Any,
) -> nn.Module:
    """Record a training in microbatches of some samples, each padded to its own longest."""
    kind, log_probs = STYLES[style]
    model, known = kind(), samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    called = Divided(model, 2.0) if fault == "temperature" else model
    with record(folder, model, **{"token_gradient": True, **options}):
        for _ in range(updates):
            optimizer.zero_grad()
            for start in range(0, len(known), size):
                part = known[start : start + size]
                ids = nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=PAD)
                column, length = (
                    torch.arange(1, ids.shape[1]),
                    torch.tensor([len(row) for row in part])[:, None],
                )
                rows = Rows(
                    ids,
                    (column >= 2) & (column < length),
                    ADVANTAGES[start : start + size, None],
                    sum(len(row) - 2 for row in known),
                    len(known),
                    len(known) // size,
                )
                found = log_probs(called, ids)
                if tapped:
                    old, reference = rows.other_policy(found, 0.4), rows.other_policy(found, 0.3)
                    tap_batch(
                        advantages=rows.advantages_of(fault), old_log_probs=old, ref_log_probs=reference
                    )
                loss_of(found, rows, fault).backward()
            optimizer.step()
    return model


FAULTS = {
    "mask off by one": "the losses are not the same; mask: ",
    "truncated rows counted": "21 tokens of 6 samples have a gradient",
    "population deviation": "(rule advantage-scale;",
    "another sample": "(rule advantage-groups;",
    "temperature": "the log-softmax (temperature, targets, dtype)",
    "no old log-probs": "ratio: 1: on policy, or without a ratio",
    "no clip": "clip: no token of this update is clipped",
    "KL k1": "kl: k1 with coefficient 0.1, where the golden dump has: k3",
    "KL sign": "kl: k3 with coefficient -0.1",
    "sequence mean": "the weight of a token is 1 / (samples of the whole update x tokens of the sample)",
    "denominator of the microbatch": "(rule token-gradient-denominators;",
    "constant denominator": "(rule token-gradient-scale;",
    "no division by accumulation": "(rule token-gradient-of-microbatches;",
}
"""Fault -> what `regress compare` says of it."""
