"""Weights of a model in a checkpoint, in the layout of ``save_pretrained``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.adapters.build import read_adapter
from regress.engine.adapters.parameters import has_adapter, trained_parameters
from regress.engine.adapters.save import save_adapter
from regress.engine.checkpoint.names import OPTIMIZER, REFERENCE, UNFINISHED
from regress.engine.checkpoint.tensors import read_tensors
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.pretrained import load_checkpoint
from regress.errors import CheckpointError, RegressError


@torch.no_grad()
def copied_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return copies on the CPU of a model's ``state_dict``, or of its adapter by the names of its parameters.

    Weights that share memory share it in the copies, too.
    """
    if has_adapter(model):
        return {name: p.detach().to("cpu", copy=True) for name, p in trained_parameters(model)}
    known: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, value in model.state_dict().items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        if key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        found[name] = known[key]
    return found


def save_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write weights and configuration of a model.

    Raises:
        RegressError: for a weight that is not finite.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise RegressError(
                f"{name} holds values that are not finite, so no checkpoint is written; lower the learning rates or "
                "raise optimizer.eps"
            )
    if has_adapter(model):
        save_adapter(model, folder, weights)
    else:
        model.save_pretrained(folder, state_dict=dict(weights))


def read_weights(model: PreTrainedModel, folder: Path, stated: str) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the names of a model's parameters.

    Raises:
        CheckpointError: if they are not those of this model, or can only be read as a pickle.
    """
    wanted = dict(trained_parameters(model))
    found = read_adapter(folder) if has_adapter(model) else _tensors(folder, stated)
    if not (has_adapter(model) or wanted.keys() <= found.keys()):  # transformers saves some under other names
        loaded = load_checkpoint(folder, {}, {}, "trainer.resume_from_checkpoint")
        found |= {name: value.detach() for name, value in loaded.named_parameters()}
    for name, value in wanted.items():
        if name not in found or found[name].shape != value.shape:
            what = "lacks" if name not in found else f"has the shape {list(found[name].shape)} for"
            raise CheckpointError(
                f"{stated}: its model {what} {name} of shape {list(value.shape)}; resume with the model that wrote it"
            )
    return {name: found[name] for name in wanted}


@torch.no_grad()
def load_weights(policy: LocalPolicy, weights: Mapping[str, Tensor]) -> None:
    """Put whole weights into a policy: on each rank its part."""
    for name, own in policy.named_parameters():
        whole = weights[name].to(own.device, own.dtype)
        local(own).copy_(local(policy.part(name, whole)))


def _tensors(folder: Path, stated: str) -> dict[str, Tensor]:
    files = sorted(
        {*folder.glob("*.safetensors")} - {folder / name for name in (OPTIMIZER, REFERENCE, UNFINISHED)}
    )
    if not files:
        raise CheckpointError(
            f"{stated} holds no safetensors file, and other weights are not read; resume from another checkpoint"
        )
    return {name: value for path in files for name, value in read_tensors(path)[0].items()}
