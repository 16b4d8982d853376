"""Files of a model, as ``save_pretrained`` writes them: a whole model, or an adapter and what it stands on."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.adapters.adapter_modules import PREFIX
from regress.engine.adapters.adapter_parameters import has_adapter, trained_parameters
from regress.engine.adapters.adapter_settings import BASE, CONFIG, WEIGHTS

MERGED = "merged"


def save_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    home: Path | None = None,
    merged: bool = False,
    portable: bool = False,
) -> None:
    """Save a model, or of a model with an adapter ``adapter_model.safetensors`` and ``adapter_config.json``.

    A base model that was loaded from a directory is named by its absolute path in ``adapter_config.json``. One that
    lies nowhere yet is saved in ``base/``.

    Args:
        home: where the folder will lie in the end; with it, ``base/`` is named by its absolute path.
        merged: save the whole model with the adapter merged into its weights in ``merged/``, too.
        portable: save the base model in any case, so that the folder depends on no other.
    """
    if not has_adapter(model):
        model.save_pretrained(folder)
        return
    save_adapter(model, folder, dict(trained_parameters(model)), home=home, portable=portable)
    if merged:
        without_adapter(model, merge=True).save_pretrained(folder / MERGED)


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    home: Path | None = None,
    portable: bool = False,
) -> None:
    """Save an adapter with these weights, by the names of `trained_parameters`; see `save_model`."""
    config: Any = model.peft_config["default"]
    base = config.base_model_name_or_path
    folder.mkdir(parents=True, exist_ok=True)
    if base is None or portable:
        without_adapter(model).save_pretrained(folder / BASE)
        base = BASE if home is None else str((home / BASE).absolute())
    tensors = {f"{PREFIX}{name}": value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {**config.to_dict(), "base_model_name_or_path": str(base)}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    (folder / CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")


def without_adapter(model: PreTrainedModel, *, merge: bool = False) -> PreTrainedModel:
    """Return a copy of a model without its adapter, which is merged into the weights or dropped."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if not isinstance(module, BaseTunerLayer) or ".base_layer" in name:
            continue
        layers: list[Any] = [module]  # of an adapter of several parameters, one inside of the other
        while isinstance(inner := layers[-1].base_layer, BaseTunerLayer):
            layers.append(inner)
        for layer in reversed(layers) if merge else ():
            layer.merge(safe_merge=True)
        owner, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(owner), leaf, inner)
    plain._hf_peft_config_loaded = False
    del plain.peft_config
    return plain
