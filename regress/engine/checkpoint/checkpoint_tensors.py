"""Tensors of a checkpoint as files of safetensors: weights, optimizer, reference and unfinished step.

Weights have the layout of ``save_pretrained``. The state of an optimizer is gathered whole from all ranks, and handed
back to them in any layout. A checkpoint of schema 1 holds all but the weights as a dump of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from regress.dump.canonical_json import dumps, loads
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array, to_numpy, to_torch
from regress.dump.record import Record
from regress.engine.adapters.adapter_modules import read_adapter
from regress.engine.adapters.adapter_parameters import has_adapter, trained_parameters
from regress.engine.adapters.model_files import save_adapter
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint.checkpoint_names import DUMP, OPTIMIZER, REFERENCE, UNFINISHED
from regress.engine.checkpoint.trainer_state import CheckpointState
from regress.engine.engine_ranks import World
from regress.engine.local_tensor import local
from regress.engine.pretrained_checkpoint import load_checkpoint
from regress.errors import CheckpointError, RegressError, reason
from regress.layout import ShardLayout

_PLAIN = {"format": "pt"}  # as transformers and others write it
_RECORDS = "records"
"""Entry of a file's metadata: type of each record -> its metadata, as JSON."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a file of safetensors, those that share memory each by itself."""
    whole = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    save_file(whole, path, {**_PLAIN, **(metadata or {})})


def is_plain(path: Path) -> bool:
    """Return True for a file of safetensors that is not a record of a dump, such as a checkpoint's optimizer."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.metadata() == _PLAIN)
    except (OSError, SafetensorError):
        return False


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file of safetensors; raises `CheckpointError` if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata() or {}
    except (OSError, SafetensorError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}); copy the checkpoint again, or resume from another one"
        ) from error


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write the records of an unfinished step, one of each type, as one file: tensors ``<type>/<name>``."""
    found = {record.type: record for record in records}
    tensors = {
        f"{type}/{name}": to_torch(a) for type, one in found.items() for name, a in one.tensors.items()
    }
    write_tensors(path, tensors, {_RECORDS: dumps({type: one.meta for type, one in found.items()})})


def optimizer_of(state: CheckpointState) -> dict[str, Tensor]:
    """Return the tensors ``<parameter>/<state>`` of a checkpoint's optimizer.

    Raises:
        CheckpointError: if it holds none, or they cannot be read.
    """
    return _tensors_of(state, OPTIMIZER, "optimizer", "state of the optimizer")


def reference_of(state: CheckpointState) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's reference model; raises `CheckpointError` as `optimizer_of` does."""
    return _tensors_of(state, REFERENCE, "param", "reference model")


def unfinished_of(state: CheckpointState) -> dict[str, Record]:
    """Return the records of a checkpoint's unfinished step by their types.

    Raises:
        CheckpointError: if it holds none, or they cannot be read.
        DumpError: if it is of schema 1, and a record is damaged.
    """
    path = Path(str(state.path)) / UNFINISHED
    if not path.exists():
        dump = _dumped(state)
        if dump is None:
            raise _missing(state, "unfinished step")
        return {record.type: record for record in dump.records(step=state.step)}
    tensors, metadata = read_tensors(path)
    try:
        return {
            type: Record(
                type,
                state.step,
                {
                    name.removeprefix(f"{type}/"): to_numpy(value, name)
                    for name, value in tensors.items()
                    if name.startswith(f"{type}/")
                },
                meta,
            )
            for type, meta in loads(metadata[_RECORDS]).items()
        }
    except (KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not an unfinished step ({reason(error)}); resume from another checkpoint"
        ) from None


def _tensors_of(state: CheckpointState, name: str, type: str, what: str) -> dict[str, Tensor]:
    path = Path(str(state.path)) / name
    if path.exists():
        return read_tensors(path)[0]
    dump = _dumped(state)
    found = [] if dump is None else [*dump.records(type, state.step)]
    if len(found) != 1:
        raise _missing(state, what)
    return {name: to_torch(array.copy()) for name, array in found[0].tensors.items()}


def _dumped(state: CheckpointState) -> DumpReader | None:
    folder = Path(str(state.path)) / DUMP
    return DumpReader(folder) if folder.is_dir() else None


def _missing(state: CheckpointState, what: str) -> CheckpointError:
    return CheckpointError(f"{state.path} holds no {what}; resume from another checkpoint")


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
            raise RegressError(f"""{name} holds values that are not finite, so no checkpoint is written; lower the
            learning rates or raise optimizer.eps""")
    if has_adapter(model):
        save_adapter(model, folder, weights)
    else:
        model.save_pretrained(folder, state_dict=dict(weights))


def read_weights(model: PreTrainedModel, folder: Path, stated: str) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the names of a model's parameters.

    Raises:
        CheckpointError: if they are not those of this model, or can only be read as a pickle.
    """
    parameters = dict(trained_parameters(model))
    found = read_adapter(folder) if has_adapter(model) else _tensors(folder, stated)
    if not (
        has_adapter(model) or parameters.keys() <= found.keys()
    ):  # transformers saves some under other names
        loaded = load_checkpoint(folder, {}, {}, "trainer.resume_from_checkpoint")
        found |= {name: value.detach() for name, value in loaded.named_parameters()}
    for name, value in parameters.items():
        if name not in found or found[name].shape != value.shape:
            what = "lacks" if name not in found else f"has the shape {list(found[name].shape)} for"
            raise CheckpointError(
                f"{stated}: its model {what} {name} of shape {list(value.shape)}; resume with the model that wrote it"
            )
    return {name: found[name] for name in parameters}


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


Part = tuple[ShardLayout | None, Array]


def whole_state(
    optimizer: Optimizer, policy: LocalPolicy, world: World
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of every parameter as whole tensors ``<parameter>/<state>``, and the states that are none.

    All ranks call this together; only the first gets the tensors, which are copies.
    """
    tensors: dict[str, Part] = {}
    others: dict[str, Any] = {}
    for name, parameter in policy.named_parameters():
        if name not in policy.owned:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                split = local(value).shape == local(parameter).shape and value.dim() > 0
                tensors[f"{name}/{key}"] = _part(policy, name, value, split=split)
            else:
                others[f"{name}/{key}"] = value
    rest = {key: value for found in world.gather(others) for key, value in found.items()}
    return {name: to_torch(array) for name, array in _assembled(tensors, world).items()}, rest


def _part(policy: LocalPolicy, name: str, value: Tensor, *, split: bool) -> Part:
    return (policy.shard(name) if split else None), to_numpy(local(value).detach(), name)


def _assembled(own: dict[str, Part], world: World) -> dict[str, Array]:
    """Return whole tensors from the parts of all ranks, on the first; nothing on the others."""
    if world.plan.mesh.world_size == 1:
        return {name: array for name, (_, array) in own.items()}
    parts = world.gather(own)
    if not world.main:
        return {}
    whole: dict[str, Array] = {}
    for part in parts:
        for name, (shard, array) in part.items():
            if shard is None:
                whole[name] = array
                continue
            full = whole.setdefault(name, np.zeros(shard.shape, array.dtype))
            shard.gather(array, full)
    return whole


def load_whole(
    optimizer: Optimizer,
    policy: LocalPolicy,
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Any],
    stated: str,
) -> None:
    """Put a state that `whole_state` returned into the optimizer: on each rank its part.

    Args:
        tensors, others: what it returned.
        stated: name of the checkpoint, for errors.

    Raises:
        CheckpointError: if it is the state of other parameters.
    """
    named = dict(policy.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(policy.architecture)}
    found: dict[str, dict[str, Any]] = {}
    for full, value in (*tensors.items(), *others.items()):
        name, _, key = full.rpartition("/")
        if name not in shapes:
            raise CheckpointError(f"""{stated}: its optimizer has a state of {name}, which is not a parameter of this
            model; resume with the model that wrote it""")
        found.setdefault(name, {})[key] = value
    optimizer.state.clear()
    for name, parameter in named.items():
        for key, value in found.get(name, {}).items():
            if isinstance(value, Tensor):
                value = _own(policy, name, key, value, shapes[name], stated)
            optimizer.state[parameter][key] = value
    _place(optimizer)


def _own(
    policy: LocalPolicy, name: str, key: str, value: Tensor, shape: tuple[int, ...], stated: str
) -> Tensor:
    """Return this rank's part of a state tensor, on the CPU or placed like the parameter."""
    if not value.dim():
        return value
    if value.shape != shape:
        if policy.shard(name) is None:
            return value  # such as the factors of a factored moment
        raise CheckpointError(f"""{stated}: the optimizer's {name}/{key} has shape {list(value.shape)} for a parameter
        of shape {list(shape)}, so no rank's part of it is known; resume with parallel.* that leave parameters whole""")
    part = policy.part(name, value)
    if part.dtype != value.dtype:
        raise CheckpointError(f"""{stated}: the optimizer's {name}/{key} is {value.dtype} and its parameter
        {part.dtype}, so it cannot be split over ranks; resume with parallel.* that leave parameters whole""")
    return part


def _place(optimizer: Optimizer) -> None:
    """Move each state to where the optimizer wants it; a fused one keeps its step counts beside the parameters."""
    for group in optimizer.param_groups:
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (value.dim() or beside):
                    optimizer.state[parameter][key] = value.to(parameter.device)
