"""Saves of the service: checkpoints of the engine, which hold the weights and, of a state, the optimizer."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from regress.dump.dump_manifest import MANIFEST
from regress.durable_files import publish
from regress.engine.checkpoint.checkpoint_names import OPTIMIZER, STATE
from regress.engine.checkpoint.checkpoint_tensors import (
    copied_weights,
    load_weights,
    load_whole,
    optimizer_of,
    read_weights,
    whole_state,
)
from regress.engine.checkpoint.checkpoint_writer import write_files
from regress.engine.checkpoint.configuration_changes import resolved
from regress.engine.checkpoint.run_snapshot import FINGERPRINT, Snapshot
from regress.engine.checkpoint.trainer_state import CheckpointState, read_state
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.engine.run_provenance import provenance
from regress.engine.tokenizer import fingerprint
from regress.errors import CheckpointError, RegressError, reason
from regress.service.host.base_models import Base
from regress.service.host.training_model import Model
from regress.service.service_api import LoraSpec, ModelSpec, SaveKind, ServiceError

SERVICE = "service"
"""Entry of a checkpoint's ``parts`` that tells of the service's model."""


def save(model: Model, folder: Path, kind: SaveKind, world: World) -> None:
    """Write a save into a folder that does not exist yet: all of it or nothing; all ranks together.

    Raises:
        ServiceError: with gradients since the last step, which no save keeps; or if it cannot be written.
    """
    if model.pending and kind is not SaveKind.SAMPLER:
        raise ServiceError(
            f"""{model.pending} forward_backward requests since the last optim_step have left gradients, which a save
            does not keep; send optim_step first""",
            code="pending_gradients",
        )
    snapshot = _snapshot(model, kind, world)
    raise_on_all_ranks(world, lambda: None if snapshot is None else _write(snapshot, folder))


def _write(snapshot: Snapshot, folder: Path) -> None:
    if folder.exists():
        raise ServiceError(f"{folder.name} exists already; save under another name", code="exists")
    working = folder.with_name(f".partial-{folder.name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(working, ignore_errors=True)
        write_files(snapshot, working)
        publish(working, folder)
    except (OSError, SafetensorError, RegressError) as error:
        shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, RegressError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        raise ServiceError(
            f"{folder.name} cannot be saved ({why}); free space on the service's disk and save again",
            code="save_failed",
            category="server",
            retryable=True,
        ) from error


def _snapshot(model: Model, kind: SaveKind, world: World) -> Snapshot | None:
    """Return what is to be written, on the first rank; None on the others."""
    whole = model.policy.whole_model()
    if model.spec.lora is not None:
        model.base.digest()  # on all ranks together
    tensors: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Any] = {}
    if kind is SaveKind.STATE:
        tensors[OPTIMIZER], others = whole_state(model.optimizer, model.policy, world)
    if not world.main:
        return None
    config, mesh = model.base.config, world.plan.mesh
    origin = provenance(config, fingerprint(model.base.tokenizer), mesh)
    lora = model.spec.lora
    description = {
        "kind": kind.value,
        "base_model": model.base.name,
        "lora": None if lora is None else vars(lora),
        "frozen_sha256": None if lora is None else model.base.digest(),
        "model_id": model.id,
    }
    state = CheckpointState(
        path=Path(),
        step=model.step,
        update=model.step,
        updates_in_step=0,
        config=resolved(config),
        world_size=mesh.world_size,
        mesh=dict(mesh.sizes),
        scheduler={"updates": model.step, "learning_rates": []},
        segment=0,
        sequence=-1,
        parts={SERVICE: description, FINGERPRINT: fingerprint(model.base.tokenizer)},
        optimizer=others,
        environment=origin.environment,
        versions=origin.versions,
    )
    return Snapshot(
        whole, copied_weights(whole), model.base.tokenizer, state, tensors, [], {STATE: state.to_bytes()}
    )


def opened(folder: Path, world: World) -> tuple[CheckpointState, Mapping[str, Any]]:
    """Return the state of a save, verified by the first rank, and what it tells of the service's model.

    Raises:
        CheckpointError: on every rank, if it is missing, damaged, or no save of a service.
    """
    from regress.engine.checkpoint.trainer_state import parse_state

    def read() -> tuple[CheckpointState, Mapping[str, Any]]:
        state = read_state(folder) if world.main else parse_state(folder)
        description = state.parts.get(SERVICE)
        if not isinstance(description, Mapping):
            raise CheckpointError(f"{folder.name} is not a save of a training service; give the path of one")
        return state, description

    return raise_on_all_ranks(world, read)


def stamp(folder: Path) -> str:
    """Return what tells this save from any other: the hash of its manifest, which holds those of its files.

    Raises:
        CheckpointError: if it is gone.
    """
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{folder.name} is gone ({error.strerror}); create a sampler of another save"
        ) from error


def sampled_weights(architecture: PreTrainedModel, folder: Path, expected: str) -> dict[str, Tensor]:
    """Return the weights of a save.

    Raises:
        CheckpointError: if another one has taken its place, or it is damaged or of another model.
    """
    if stamp(folder) != expected:
        raise CheckpointError(
            f"{folder.name} was replaced by another save of this name; create a new sampler of it"
        )
    return read_weights(architecture, folder, folder.name)


def spec_of(description: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a save is of."""
    lora = description.get("lora")
    return ModelSpec(str(description["base_model"]), None if lora is None else LoraSpec(**lora))


def load(model: Model, folder: Path, world: World, *, optimizer: bool) -> None:
    """Put a save into a model of the same kind: weights and step, and its optimizer or a fresh one.

    Gradients since the last step are dropped. All ranks call this together.

    Raises:
        CheckpointError: on every rank, if it is damaged or of another model; the model is then unchanged.
    """
    state, description = opened(folder, world)
    spec = spec_of(description)
    if (spec.base_model, spec.lora) != (model.spec.base_model, model.spec.lora):
        raise CheckpointError(f"""{folder.name} is a save of {spec.base_model} with {_lora(spec)}, and {model.id} is
        {model.spec.base_model} with {_lora(model.spec)}; load it into a model of its kind""")
    require_base(model.base, description, folder)
    weights = raise_on_all_ranks(world, lambda: read_weights(model.policy.architecture, folder, folder.name))
    found = raise_on_all_ranks(world, lambda: _optimizer(folder, state)) if optimizer else None
    load_weights(model.policy, weights)
    model.optimizer.state.clear()
    if found is not None:
        load_whole(model.optimizer, model.policy, found, state.optimizer, folder.name)
    model.drop_gradients()
    model.step = state.step
    model.dump.rewind(model.step)


def require_base(base: Base, description: Mapping[str, Any], folder: Path) -> None:
    """Refuse an adapter's save if the model under it is another one by now; all ranks call this together.

    Raises:
        CheckpointError: on every rank.
    """
    if description.get("lora") is not None and description.get("frozen_sha256") != base.digest():
        raise CheckpointError(f"""{folder.name} is the adapter of other weights than {base.name} has now; offer under
        this name the model that it was trained on""")


def _optimizer(folder: Path, state: CheckpointState) -> dict[str, Tensor]:
    if state.parts[SERVICE].get("kind") != SaveKind.STATE.value:
        raise CheckpointError(f"""{folder.name} holds weights without a state of the optimizer; load it without the
        optimizer, or save the state""")
    return optimizer_of(state)


def _lora(spec: ModelSpec) -> str:
    return "full parameters" if spec.lora is None else f"LoRA of rank {spec.lora.rank}"
