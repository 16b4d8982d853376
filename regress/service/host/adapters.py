"""Adapters that clients ask for, in the engine's terms."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from regress.engine.adapters.settings import of_directory
from regress.engine.config.schema import Config
from regress.engine.hub import local_folder
from regress.service.api import LoraSpec, ServiceError


def target_modules(model: PreTrainedModel, lora: LoraSpec) -> list[str]:
    """Return the ends of the names of the linear layers that are adapted: those of attention, MLP and output.

    Routers of experts are left out.

    Raises:
        ServiceError: if a part is asked for that has no linear layers, such as fused experts, or nothing at all.
    """
    head = model.get_output_embeddings()
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        owner, _, leaf = name.rpartition(".")
        parent = owner.rpartition(".")[2]
        if module is head:
            found["train_unembed"].append(name)
        elif "attn" in parent:
            found["train_attn"].append(f"{parent}.{leaf}")
        elif "mlp" in owner and leaf != "gate":
            found["train_mlp"].append(f"{parent}.{leaf}")
    names: list[str] = []
    for part, modules in found.items():
        if not getattr(lora, part):
            continue
        if not modules:
            raise ServiceError(
                f"lora_config.{part}=true finds no linear layers in {type(model).__name__}; set it to false"
            )
        names += dict.fromkeys(modules)
    if not names:
        raise ServiceError("lora_config trains nothing; set train_attn, train_mlp or train_unembed to true")
    return names


def require_rank(lora: LoraSpec | None, config: Config, name: str) -> None:
    """Refuse another rank than that of the adapter which is offered.

    Raises:
        ServiceError: naming both.
    """
    offered = of_directory(local_folder(str(config.model.path), "model.path"), "model.path").r
    if lora is None or lora.rank != offered:
        asked = "full parameters" if lora is None else f"rank {lora.rank}"
        raise ServiceError(
            f"base_model={name!r} is an adapter of rank {offered}, and {asked} is asked for; create it with this rank"
        )
