"""Local checkpoint directory as a model: every weight is read from it, and none of its code runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from regress.errors import ConfigError, reason


def load_checkpoint(
    path: Path, overrides: Mapping[str, Any], implementations: Mapping[str, str], key: str = "model.path"
) -> PreTrainedModel:
    """Load the causal language model of a directory written by ``save_pretrained``, in its own dtype, every
    dropout 0.

    Nothing is downloaded, and code beside the weights or in a pickle is never run. ``key`` is the configuration
    key that named the directory.

    Raises:
        ConfigError: if it cannot be loaded, or if the weights are not those of the model that ``config.json``
            describes: Hugging Face would fill the gaps with random numbers.
    """
    stated = f"{key}={str(path)!r}"
    hf = checkpoint_config(path, key)
    _override(hf, overrides)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=without_dropout(hf),
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **having_attention(hf, implementations),
            )
    except UnpicklingError as error:  # torch's own message recommends executing it
        raise ConfigError(f"""{stated}: the checkpoint is a pickle that holds code, which was not executed; give one
        whose weights are in model.safetensors""") from error
    except Exception as error:  # transformers raises whatever its parsers raise
        raise _unreadable(stated, error) from error
    model: PreTrainedModel = loaded[0]
    _refuse_gaps(stated, loaded[1])
    return model


def checkpoint_config(path: Path, key: str = "model.path") -> PretrainedConfig:
    """Read ``config.json`` of a checkpoint directory.

    Raises:
        ConfigError: if there is no such directory, or it holds no configuration that can be read.
    """
    stated = f"{key}={str(path)!r}"
    if not path.is_dir():
        raise ConfigError(
            f"{stated}: there is no such directory, and models are not downloaded; give one written by save_pretrained"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{stated}: the directory holds no config.json; give a directory written by save_pretrained"
        )
    try:
        with quiet():
            found: PretrainedConfig = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise _unreadable(stated, error) from error
    return found


def _unreadable(stated: str, error: Exception) -> ConfigError:
    return ConfigError(f"""{stated}: the checkpoint cannot be loaded ({reason(error)}); give a causal language model
    written by save_pretrained""")


def without_dropout(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with every dropout probability set to 0."""
    for key, value in hf.to_dict().items():
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(hf, key, 0.0)
    return hf


def having_attention(hf: PretrainedConfig, implementations: Mapping[str, str]) -> dict[str, str]:
    """Return the implementations, with eager attention in place of an sdpa that the model does not have."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf), None)
    lacks = implementations.get("attn_implementation") == "sdpa" and not getattr(kind, "_supports_sdpa", True)
    return {**implementations, **({"attn_implementation": "eager"} if lacks else {})}


def _override(hf: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Apply ``model.config`` over the checkpoint's config.json, as keyword arguments of ``from_pretrained`` would."""
    for key, value in overrides.items():
        if not hasattr(hf, key):
            raise ConfigError(
                f"model.config.{key}={value!r}: the config.json of model.path has no such key; correct or drop it"
            )
        setattr(hf, key, value)


def _refuse_gaps(stated: str, found: Mapping[str, Any]) -> None:
    if found["mismatched_keys"]:
        name, saved, shape = min(found["mismatched_keys"])
        raise ConfigError(f"""{stated}: the checkpoint holds {name} of shape {list(saved)} and its config.json asks for
        {list(shape)}; give weights and config.json of the same model""")
    if found["missing_keys"]:
        missing = found["missing_keys"]
        raise ConfigError(f"""{stated}: the checkpoint lacks {min(missing)} ({len(missing)} missing in all) of the model
        that its config.json describes; give weights and config.json of the same model""")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' reports about a checkpoint, which the engine states in one sentence."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
