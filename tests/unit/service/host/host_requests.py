"""Tiny models to offer, requests for them, and what a host's model holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import AdamParams, Datum, PassRequest

VOCABULARY = 14
ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
TINY = (
    *("task.train_size=32", "task.eval_size=4", "warm_start.steps=0", "data.max_seq_length=48"),
    *("model.config.hidden_size=16", "model.config.head_dim=8", "model.config.intermediate_size=32"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1"),
)


def offer(*overrides: str) -> Config:
    """Return the configuration of a tiny model, whose tokenizer knows `VOCABULARY` tokens: one datum a microbatch."""
    alone = () if any(key.startswith("batching.") for key in overrides) else ("batching.micro_batch_size=1",)
    return load_config(None, "reverse_string", [*TINY, *alone, *overrides], environ={}).config


def datums(lengths: list[int], seed: int = 0, *, mask: bool = True) -> list[Datum]:
    """Return datums of a ratio loss as a trainer sends them: a prompt that does not count, then a completion."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        tokens = rng.integers(0, VOCABULARY, length + 1)
        counted = np.arange(length) >= length // 3
        inputs: dict[str, Any] = {
            "target_tokens": tokens[1:],
            "logprobs": np.where(counted, -rng.exponential(size=length), 0.0).astype(np.float32),
            "advantages": np.where(counted, rng.normal(size=length), 0.0).astype(np.float32),
        }
        if mask:
            inputs["loss_mask"] = counted.astype(np.float32)
        found.append(Datum(tokens[:-1], inputs))
    return found


def several(found: list[Datum], seed: int = 0) -> list[Datum]:
    """Return the datums with three targets at each position, some of which are left out, for cross_entropy."""
    rng = np.random.default_rng(seed)
    changed = []
    for datum in found:
        shape = len(datum.tokens), 3
        targets = np.where(rng.random(shape) < 0.2, -100, rng.integers(0, VOCABULARY, shape))
        weights = rng.random(shape).astype(np.float32)
        changed.append(Datum(datum.tokens, {"target_tokens": targets, "weights": weights}))
    return changed


def ratio_pass(
    lengths: list[int], seed: int = 0, loss: str = "importance_sampling", **config: Any
) -> PassRequest:
    """Return a request for a ratio loss."""
    return PassRequest(datums(lengths, seed), loss, config)


def held(host: EngineHost, model_id: str = "m0") -> dict[str, Tensor]:
    """Return copies of weights, gradients and optimizer state of a model."""
    model = host._models[model_id]
    found: dict[str, Tensor] = {}
    for name, parameter in model.policy.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"{name}/grad"] = parameter.grad.clone()
        for key, value in model.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Return True if two models hold the same bits."""
    return first.keys() == second.keys() and all(bool((first[k] == second[k]).all()) for k in first)
