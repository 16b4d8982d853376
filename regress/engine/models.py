"""Causal language models: tiny seeded ones from a configuration, or a local checkpoint directory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from regress.engine import attention  # noqa: F401 - registers the varlen implementation
from regress.engine.config.schema import ModelConfig
from regress.engine.precision import DTYPES, checkpoint_contexts
from regress.errors import ConfigError

_ROPE_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}

TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_ROPE_SIZES, "head_dim": 16},
    "llama": _ROPE_SIZES,
    "qwen3_moe": {
        **_ROPE_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
"""Default sizes of the built-in families, in the names of their Hugging Face configuration."""


def build_model(
    config: ModelConfig, *, seed: int, vocab_size: int, pad_id: int, eos_id: int
) -> PreTrainedModel:
    """The policy's model, on CPU, in the configured dtype, every dropout 0.

    Dropout is turned off because sampler and trainer have to compute the same function: otherwise the ratio of
    the first update differs from 1.

    Raises:
        ConfigError: if the directory holds no model, a configuration value is unknown to the family, or the
            vocabulary is smaller than the tokenizer's.
    """
    if config.path is not None:
        model = _from_directory(config, vocab_size)
    else:
        model = _from_family(config, seed=seed, vocab_size=vocab_size, pad_id=pad_id, eos_id=eos_id)
    model = place(model, DTYPES[config.dtype])
    if config.gradient_checkpointing:
        context_fn = functools.partial(checkpoint_contexts, DTYPES[config.dtype])
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    model.train()
    return model


def place(model: PreTrainedModel, where: str | torch.dtype) -> PreTrainedModel:
    """The model on a device, or in a dtype."""
    moved: PreTrainedModel = nn.Module.to(model, where)
    return moved


def _from_family(
    config: ModelConfig, *, seed: int, vocab_size: int, pad_id: int, eos_id: int
) -> PreTrainedModel:
    hf = AutoConfig.for_model(config.family)
    special = {"vocab_size": vocab_size, "pad_token_id": pad_id, "eos_token_id": eos_id, "bos_token_id": None}
    values = {**TINY[config.family], **special, **config.config}
    for key, value in values.items():
        if not hasattr(hf, key):
            raise ConfigError(
                f"model.config.{key}={value!r}: the {config.family} configuration of transformers has no such key; "
                f"its keys are {', '.join(sorted(hf.to_dict()))}"
            )
    hf = AutoConfig.for_model(config.family, **values, tie_word_embeddings=config.tie_word_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _without_dropout(hf), dtype=torch.float32, **_implementations(config)
        )
    return model


def _from_directory(config: ModelConfig, vocab_size: int) -> PreTrainedModel:
    path = Path(str(config.path))
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path={str(path)!r}: the directory holds no config.json; give a directory written by save_pretrained"
        )
    try:
        hf = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=_without_dropout(hf),
            dtype=torch.float32,
            local_files_only=True,
            **_implementations(config),
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path={str(path)!r}: the checkpoint cannot be loaded ({first}); save it again"
        ) from error
    if model.config.vocab_size < vocab_size:
        raise ConfigError(
            f"model.path={str(path)!r}: the model knows {model.config.vocab_size} tokens, the tokenizer {vocab_size}; "
            "set tokenizer.path to the tokenizer the model was trained with"
        )
    return model


def _implementations(config: ModelConfig) -> dict[str, str]:
    chosen = {"attn_implementation": config.attn_implementation}
    if config.dtype == "float64":
        chosen["experts_implementation"] = "eager"  # grouped matrix products have no float64 kernel
    return chosen


def _without_dropout(hf: PretrainedConfig) -> PretrainedConfig:
    for key, value in hf.to_dict().items():
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(hf, key, 0.0)
    return hf
