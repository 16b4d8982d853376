"""Causal language models: tiny seeded ones from a configuration, or a local checkpoint directory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from regress.dump.float64_watch import Float64Watch, Operation
from regress.engine.adapters.adapter_modules import add_adapter, load_adapter
from regress.engine.adapters.adapter_settings import (
    base_of,
    is_adapter,
    of_directory,
    of_section,
    require_same,
)
from regress.engine.attention import VarlenSegments
from regress.engine.config.config_messages import nearest
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_hub import local_folder
from regress.engine.numeric_types import DTYPES, arithmetic, checkpoint_contexts
from regress.engine.pretrained_checkpoint import having_attention, load_checkpoint, without_dropout
from regress.engine.recurrent_layers import keep_samples_apart
from regress.engine.run_log import LOGGER
from regress.engine.user_components import own_attention, patched
from regress.errors import ConfigError, reason

_ROPE_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
_HYBRID_SIZES: Mapping[str, Any] = {
    **_ROPE_SIZES,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
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
    "qwen3_next": {**_HYBRID_SIZES, "num_experts": 0},
    "qwen3_5_text": _HYBRID_SIZES,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
"""Default sizes of the built-in families, in the names of their Hugging Face configuration."""
SMALL: Mapping[str, Any] = {
    **_ROPE_SIZES,
    "head_dim": 16,
    "ffn_dim": 128,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
}
"""Default sizes of any other family: those that its configuration knows."""


def build_model(
    config: ModelConfig, *, seed: int, vocab_size: int, pad_id: int, eos_id: int, key: str = "model"
) -> PreTrainedModel:
    """Build a model, on CPU, in the configured dtype, with every dropout 0.

    Dropout is turned off because sampler and trainer have to compute the same function: otherwise the ratio of
    the first update differs from 1. ``key`` is the section of the configuration that asks for the model.

    Raises:
        ConfigError: if the directory holds no model, a configuration value is unknown to the family, sizes do not
            fit each other, or the vocabulary is smaller than the tokenizer's.
    """
    if config.path is not None:
        stated = f"{key}.path={config.path!r}"
        remedy = "set tokenizer.path to the tokenizer the model was trained with"
        model = _loaded(config, f"{key}.path")
    else:
        stated = f"model.config={config.config!r}"
        remedy = "leave vocab_size away"
        special = {"vocab_size": vocab_size, "pad_token_id": pad_id, "eos_token_id": eos_id}
        model = _from_family(config, {**special, "bos_token_id": None}, seed, stated)
    if model.config.vocab_size < vocab_size:
        raise ConfigError(
            f"{stated}: the model knows {model.config.vocab_size} tokens and the tokenizer {vocab_size}; {remedy}"
        )
    _adapt(model, config, seed, f"{key}.path")
    model = place(model, DTYPES[config.dtype])
    if config.patch is not None:
        model = patched(model, config.patch)
    keep_samples_apart(model)
    _try_out(model, DTYPES[config.dtype], stated)
    if config.gradient_checkpointing:
        context_fn = functools.partial(checkpoint_contexts, DTYPES[config.dtype])
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    model.train()
    return model


def place(model: PreTrainedModel, where: str | torch.dtype) -> PreTrainedModel:
    """Move the model to a device, or convert it to a dtype.

    Raises:
        ConfigError: if there is no such device, or it cannot compute.
    """
    if isinstance(where, str):
        try:
            torch.zeros(1, device=where).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(
                f"device={where} cannot be used ({reason(error)}); set device=cpu or one that this machine has"
            ) from error
    buffers = dict(model.named_buffers())
    moved: PreTrainedModel = nn.Module.to(model, where)
    if isinstance(where, torch.dtype) and where != torch.float64:
        _restore_buffers(moved, buffers)
    return moved


def _restore_buffers(model: PreTrainedModel, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore the precision of buffers that no checkpoint holds (rotary frequencies), as ``from_pretrained`` does."""
    saved = model.state_dict().keys()
    for name, value in buffers.items():
        if name not in saved:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)


def _loaded(config: ModelConfig, key: str) -> PreTrainedModel:
    """Load the model of a directory, or the one under its adapter."""
    assert config.path is not None
    path = local_folder(config.path, key)
    if path != Path(config.path):
        LOGGER.info("%s=%s is %s", key, config.path, path)
    if not is_adapter(path):
        if config.lora.base_path is not None:
            raise ConfigError(f"""model.lora.base_path={config.lora.base_path!r} names the model under an adapter, and
            {key}={config.path!r} is not an adapter; set it to null""")
        return load_checkpoint(path, config.config, _implementations(config), key)
    base = base_of(path, config.lora.base_path, key)
    named = (
        "model.lora.base_path"
        if config.lora.base_path is not None
        else f"{key}={config.path!r}: the base model"
    )
    return load_checkpoint(base, config.config, _implementations(config), named)


def _adapt(model: PreTrainedModel, config: ModelConfig, seed: int, key: str) -> None:
    """Put the adapter into the model that the configuration asks for, or that its directory holds, if any."""
    if is_adapter(config.path):
        path = local_folder(str(config.path), key)
        settings = of_directory(path, key)
        require_same(config.lora, settings, path)
        settings.base_model_name_or_path = str(base_of(path, config.lora.base_path, key).absolute())
        add_adapter(model, settings, seed=seed, stated=f"{key}={config.path!r}")
        load_adapter(model, path, key)
    elif config.lora.r is not None:
        settings = of_section(config.lora)
        if config.path is not None:
            here = Path(config.path)  # a name on the hub stays one
            settings.base_model_name_or_path = str(here.absolute()) if here.exists() else config.path
        add_adapter(model, settings, seed=seed, stated=f"model.lora.r={config.lora.r}")


def _from_family(config: ModelConfig, special: Mapping[str, Any], seed: int, stated: str) -> PreTrainedModel:
    plain = AutoConfig.for_model(config.family)
    _check_keys(config, plain)
    synonyms = plain.attribute_map  # GPT-2 calls its hidden_size n_embd
    known = plain.to_dict().keys() | synonyms.keys()
    sizes = TINY.get(config.family) or {key: value for key, value in SMALL.items() if key in known}
    given = {**sizes, **special}, config.config
    values = {synonyms.get(key, key): value for mapping in given for key, value in mapping.items()}
    try:
        hf = AutoConfig.for_model(config.family, **values, tie_word_embeddings=config.tie_word_embeddings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            implementations = having_attention(hf, _implementations(config))
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                without_dropout(hf), dtype=torch.float32, **implementations
            )
    except ConfigError:
        raise
    except Exception as error:  # transformers checks some values itself, torch fails on others
        raise _unfit(stated, error) from error
    return model


def _check_keys(config: ModelConfig, known: PretrainedConfig) -> None:
    names = {*known.to_dict(), *known.attribute_map}
    for key, value in config.config.items():
        if key not in names:
            raise ConfigError(f"""model.config.{key}={value!r}: the {config.family} configuration of transformers has no
            such key; the nearest is {nearest(key, sorted(names))}""")
        if key == "tie_word_embeddings":
            raise ConfigError(
                f"model.config.{key}={value!r} is decided by another key; set model.tie_word_embeddings instead"
            )


def _try_out(model: PreTrainedModel, dtype: torch.dtype, stated: str) -> None:
    """Run two tokens forward, so that sizes that do not match show here and not after the rollout."""
    tokens = torch.zeros(1, 2, dtype=torch.long)

    def run() -> None:
        with torch.no_grad(), arithmetic(dtype):
            model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                varlen=VarlenSegments(None, (2,)),
            )

    try:
        run()
    except ConfigError:
        raise
    except Exception as error:
        watch = Float64Watch(model)
        if dtype == torch.float64 and "not implemented" in str(error):
            with suppress(Exception), watch:
                run()
        raise _unfit(stated, error, watch.failed) from error


def _unfit(stated: str, error: Exception, operation: Operation | None = None) -> ConfigError:
    if operation is not None:
        return ConfigError(f"""{stated}: {operation} does not exist in float64 ({reason(error)}); give a model without
        it, or set model.dtype=float32""")
    return ConfigError(f"""{stated}: a model of this configuration cannot run ({reason(error)}); choose sizes that fit
    each other and this machine, such as a hidden size that the number of attention heads divides""")


def _implementations(config: ModelConfig) -> dict[str, str]:
    own = None if config.attention is None else own_attention(config.attention)
    chosen = {"attn_implementation": own or config.attn_implementation}
    if config.dtype == "float64":
        chosen["experts_implementation"] = "eager"  # grouped matrix products have no float64 kernel
    return chosen
