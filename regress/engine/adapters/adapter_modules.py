"""Adapters in the modules of a model: new ones, or those of a directory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from regress.dump.adapter_names import plain_adapter_name
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.adapters.adapter_settings import CONFIG, WEIGHTS
from regress.errors import ConfigError, reason

if TYPE_CHECKING:
    from peft import LoraConfig

PREFIX = "base_model.model."
"""Prefix that peft writes before the names of parameters in an adapter's file."""


def add_adapter(model: PreTrainedModel, settings: LoraConfig, *, seed: int, stated: str) -> None:
    """Put an adapter into a model, in place; afterwards only its parameters are trained.

    Args:
        seed: seed of its random weights; the global random state is left as it was.
        stated: key and value of the configuration that ask for it.

    Raises:
        ConfigError: if peft cannot adapt this model so.
    """
    base = settings.base_model_name_or_path
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, about its own plans
            torch.manual_seed((seed + 1) % 2**32)  # other numbers than those of the model's weights
            model.add_adapter(settings)
    except Exception as error:  # peft raises errors of any type
        raise ConfigError(f"""{stated}: peft cannot put this adapter into {type(model).__name__} ({reason(error)});
        correct section model.lora, such as the names in model.lora.target_modules""") from error
    settings.base_model_name_or_path = base


def load_adapter(model: PreTrainedModel, path: Path, key: str) -> None:
    """Load the weights of an adapter from its directory; the model has the adapter already.

    Raises:
        ConfigError: if they cannot be read, or are not exactly those that the adapter's configuration asks for.
    """
    stated = f"{key}={str(path)!r}"
    found = read_adapter(path, key)
    own: dict[str, Tensor] = dict(trained_parameters(model))
    own |= {
        name: p for name, p in _frozen(model) if name in found
    }  # peft saves an adapted embedding with its adapter
    for verb, names in (("lacks", own.keys() - found.keys()), ("has additional", found.keys() - own.keys())):
        if names:
            raise ConfigError(f"""{stated}: {WEIGHTS} {verb} {min(names)} ({len(names)} in all); give weights and
            {CONFIG} of the same adapter""")
    for name, parameter in own.items():
        if found[name].shape != parameter.shape:
            raise ConfigError(f"""{stated}: {name} has shape {list(found[name].shape)} and the model under the adapter
            asks for {list(parameter.shape)}; give the model that it was trained on (model.lora.base_path)""")
        with torch.no_grad():
            parameter.copy_(found[name])


def _frozen(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((plain_adapter_name(n), p) for n, p in model.named_parameters() if not p.requires_grad)


def read_adapter(path: Path, key: str = "model.path") -> dict[str, Tensor]:
    """Read the weights of an adapter by name, as `trained_parameters` has it.

    Raises:
        ConfigError: if there is no file of safetensors, or it is damaged.
    """
    stated = f"{key}={str(path)!r}"
    if not (path / WEIGHTS).is_file():
        raise ConfigError(f"""{stated}: the directory holds {CONFIG} and no {WEIGHTS}, and weights in pickles are not
        loaded; give an adapter saved as safetensors""")
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError, ValueError, MemoryError) as error:
        raise ConfigError(
            f"{stated}: {WEIGHTS} cannot be read ({reason(error)}); give an intact file"
        ) from error
    return {plain_adapter_name(name.removeprefix(PREFIX)): value for name, value in tensors.items()}
