"""Trained parameters of a model, under names that no implementation of an adapter changes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from regress.dump.adapter_names import plain_adapter_name


def has_adapter(model: nn.Module) -> bool:
    """Return True if only an adapter of the model is trained."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapted_experts(model: nn.Module) -> str | None:
    """Return the name of a module whose parameters are adapted without a layer of their own, as fused experts are."""
    if not has_adapter(model):
        return None
    from peft.tuners.lora.layer import ParamWrapper

    return next((name for name, module in model.named_modules() if isinstance(module, ParamWrapper)), None)


def trained_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters of a plain model, and those that are trained of a model with an adapter.

    Names are those of the base model, and of the adapter's file without ``base_model.model.``:
    ``model.layers.0.self_attn.q_proj.lora_A.weight``. Tied parameters are yielded once.
    """
    if not has_adapter(model):
        yield from model.named_parameters()
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield plain_adapter_name(name), parameter
