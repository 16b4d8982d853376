"""A plain GRPO loop under `guard`, with a place for a fault, alone or on one of two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress.live.guard import Guard, guard

VOCABULARY, GROUPS, SIZE, WIDTH = 40, 3, 4, 12
Values = dict[str, Any]


@dataclass
class Loop:
    """Settings of a run, and the faults that are planted in one of its steps."""

    steps: int = 4
    micros: int = 2
    aggregation: str = "tokens"
    dtype: torch.dtype = torch.float32
    kl: float = 0.0
    seed: int = 0
    at: int = 2
    values: Callable[[Values], Values] = lambda values: values
    loss: Callable[[Tensor, int], Tensor] = lambda loss, number: loss
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    before_update: Callable[[nn.Module], None] = lambda model: None
    after_update: Callable[[nn.Module], None] = lambda model: None
    baseline: Callable[[Tensor], Tensor] = lambda rewards: rewards.mean(1, keepdim=True)
    options: dict[str, Any] = field(default_factory=dict)


def tiny_model(dtype: torch.dtype) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with the same random weights every time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.35}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def log_probs_of(model: nn.Module, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token, ``[B, T]``, at its own place; 0 for the first one."""
    logits = model(input_ids=ids[:, :-1]).logits / temperature
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(found, (1, 0))


def run(loop: Loop, model: nn.Module | None = None, rank: int = 0, ranks: int = 1) -> Guard:
    """Train under `guard`; each rank has its part of every group's rows."""
    model = tiny_model(loop.dtype) if model is None else model
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(loop.seed)
    options = {"group_size": SIZE, **loop.options}
    with guard(model, **options) as watch:
        older = copy.deepcopy(plain)
        for step in range(loop.steps):
            faulty = loop if step == loop.at else Loop()
            ids = torch.randint(2, VOCABULARY, (GROUPS * SIZE, WIDTH), generator=draw)
            stops = torch.randint(5, WIDTH + 1, (GROUPS * SIZE, 1), generator=draw)
            mask = (torch.arange(WIDTH) >= 3) & (torch.arange(WIDTH) < stops)
            rewards = torch.randint(0, 5, (GROUPS, SIZE), generator=draw).to(loop.dtype)
            advantages = (rewards - faulty.baseline(rewards)).reshape(-1)
            with torch.no_grad():
                old, last = log_probs_of(plain, ids), log_probs_of(older, ids)
            noise = torch.randn(old.shape, generator=draw).to(loop.dtype) * 1e-6 * old.abs()
            older = copy.deepcopy(plain)
            own = torch.arange(GROUPS * SIZE)[rank::ranks]
            for number, rows in enumerate(own.chunk(loop.micros)):
                log_probs = log_probs_of(model, ids[rows])
                values = {
                    "log_probs": log_probs,
                    "loss_mask": mask[rows],
                    "old_log_probs": old[rows],
                    "sampler_log_probs": (old + noise)[rows],
                    "advantages": advantages[rows],
                    "samples": rows.tolist(),
                    "groups": (rows // SIZE + step * GROUPS).tolist(),
                    "on_policy": True,
                }
                told = faulty.values({**values, "stale": last[rows], "number": number})
                told = {name: value for name, value in told.items() if name not in ("stale", "number")}
                watch.batch(**told, recompute=partial(log_probs_of, plain, ids[rows]))
                loss = _loss(loop, log_probs, values, mask[own], ranks)
                last_one = number == loop.micros - 1
                with model.no_sync() if ranks > 1 and not last_one else nullcontext():  # type: ignore[operator]  # DDP
                    faulty.backward(faulty.loss(loss, number))
            faulty.before_update(plain)
            optimizer.step()
            faulty.after_update(plain)
            optimizer.zero_grad()
    return watch


def _loss(loop: Loop, log_probs: Tensor, values: Values, everywhere: Tensor, ranks: int) -> Tensor:
    mask, advantages = values["loss_mask"], values["advantages"][:, None]
    ratio = (log_probs - values["old_log_probs"]).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if loop.kl:
        gap = (
            values["stale"] if "stale" in values else values["old_log_probs"] - 0.1 * log_probs.detach().sin()
        )
        losses = losses + loop.kl * ((gap - log_probs).exp() - (gap - log_probs) - 1)
    loss: Tensor
    if loop.aggregation == "tokens":
        loss = (losses * mask).sum() / everywhere.sum()
    elif loop.aggregation == "samples":
        loss = ((losses * mask).sum(1) / mask.sum(1)).sum() / len(everywhere)
    else:
        loss = (losses * mask).sum() / mask.sum() / loop.micros
    return loss


def _one_rank_moves(model: nn.Module) -> None:
    if distributed.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] *= 1 + 2**-20


def _same_rows(values: Values) -> Values:
    return {**values, "samples": [0] * len(values["samples"])} if values["number"] == 0 else values


RANK_FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "replicas": {"before_update": _one_rank_moves},
    "repeated": {"values": _same_rows},
}


def told(fault: str) -> str:
    """Train as one of two ranks; return the summary, or the violation."""
    model = nn.parallel.DistributedDataParallel(tiny_model(torch.float32))
    try:
        return run(Loop(**RANK_FAULTS[fault]), model, distributed.get_rank(), 2).summary()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
