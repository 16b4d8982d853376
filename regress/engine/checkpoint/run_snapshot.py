"""Snapshot of a run in memory, taken by all ranks together, from which the first writes a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regress.dump.canonical_json import plain
from regress.dump.dump_continuation import ContinuationPoint
from regress.dump.record import Record
from regress.engine.checkpoint.checkpoint_names import (
    CURRICULUM_STATE,
    OPTIMIZER,
    REFERENCE,
    STATE,
    TRAINER_STATE,
    checkpoint_name,
)
from regress.engine.checkpoint.checkpoint_tensors import copied_weights, whole_state
from regress.engine.checkpoint.configuration_changes import resolved
from regress.engine.checkpoint.trainer_state import CheckpointState, DumpPosition, json_bytes, trainer_state
from regress.engine.checkpoint.unfinished_step import outcomes_of, records_of
from regress.engine.grpo_trainer import Trainer, UnfinishedStep
from regress.engine.run_construction import Run
from regress.engine.run_provenance import provenance
from regress.engine.tokenizer import fingerprint

FINGERPRINT = "tokenizer_fingerprint"
"""Entry of ``parts`` that tells the tokenizer apart."""
REMOTE = "remote"
"""Entry of ``parts`` that tells where a service keeps the weights and the state of the optimizer."""


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment; nothing in it changes any more.

    Attributes:
        model: the model, for its configuration; its values go on changing. None where a service keeps the weights.
        weights: see `copied_weights`.
        state: content of ``regress_state.json``.
        tensors: tensors other than the weights, by the names of their files.
        records: those of the unfinished step.
        files: content of further files by name.
    """

    model: PreTrainedModel | None
    weights: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    state: CheckpointState
    tensors: dict[str, dict[str, Tensor]]
    records: list[Record]
    files: dict[str, bytes]

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return checkpoint_name(self.state.step, self.state.updates_in_step)


def take(
    run: Run, step: int, work: UnfinishedStep | None, pass_rates: Mapping[int, float], segment: int
) -> Snapshot | None:
    """Return a snapshot on the first rank, None on the others; all ranks call this together.

    Args:
        step: completed rollout steps.
        work: the unfinished step, if some of its updates are made.
        pass_rates: held-out pass rate by step.
        segment: number of this part of the run, if its log has none.

    Raises:
        DumpError: on every rank, if the run's dump cannot be written.
    """
    trainer, config = run.trainer, run.config
    place = ContinuationPoint(step, 0 if work is None else len(work.outcomes))
    dumps = {
        name: DumpPosition(str(recorder.folder), *vars(recorder.position(place)).values())
        for name, recorder in run.recorders.items()
    }
    if run.remote is None:
        copied = _copied_to_memory(run)
    else:
        saved = run.remote.save(checkpoint_name(step, place.updates_in_step))
        copied = _InMemory(parts={REMOTE: dict(saved)})
    if not trainer.world.main:
        return None
    records = [] if work is None else records_of(work, step, trainer.trajectory_meta(step))
    origin = provenance(config, fingerprint(run.tokenizer), trainer.world.plan.mesh)
    parts = {name: plain(part.state_dict(), name) for name, part in run.parts.items()}
    log: Any = parts.get("tracking") or {}
    mesh = trainer.world.plan.mesh
    state = CheckpointState(
        path=Path(),
        step=step,
        update=trainer.updates,
        updates_in_step=place.updates_in_step,
        config=resolved(config),
        world_size=mesh.world_size,
        mesh=dict(mesh.sizes),
        scheduler=_schedule(trainer),
        segment=log.get("segment", segment),
        sequence=log.get("sequence", -1),
        parts={**parts, **copied.parts, FINGERPRINT: fingerprint(run.tokenizer)},
        pass_rates=dict(pass_rates),
        outcomes=[] if work is None else outcomes_of(work),
        dumps=dumps,
        optimizer=copied.others,
        has_reference=REFERENCE in copied.tensors,
        environment=origin.environment,
        versions=origin.versions,
    )
    weights = {} if copied.model is None else copied_weights(copied.model)
    files = _files(run, state, parts)
    return Snapshot(copied.model, weights, run.tokenizer, state, copied.tensors, records, files)


@dataclass(frozen=True)
class _InMemory:
    """Weights and states of the optimizer and the reference, or what tells where a service keeps them."""

    model: PreTrainedModel | None = None
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)


def _copied_to_memory(run: Run) -> _InMemory:
    """Return what the ranks of a run hold; all of them call this together, and the first gets the tensors."""
    trainer = run.trainer
    reference = _reference(run)  # first: it may be computed in the policy's place
    model = trainer.policy.whole_model()
    tensors, others = whole_state(trainer.optimizer, trainer.policy, trainer.world)
    if not trainer.world.main:
        return _InMemory()
    found = {OPTIMIZER: tensors}
    if reference is not None:  # copied, as its values may go on changing
        found[REFERENCE] = {name: value.detach().to("cpu", copy=True) for name, value in reference.items()}
    return _InMemory(model, found, others)


def _schedule(trainer: Trainer) -> dict[str, Any]:
    return {
        "updates": trainer.scheduler.last_epoch,
        "learning_rates": trainer.scheduler.get_last_lr(),
    }


def _files(run: Run, state: CheckpointState, parts: Mapping[str, Any]) -> dict[str, bytes]:
    trainer = trainer_state(run.config, state, run.prompts.training_problems)
    files = {STATE: state.to_bytes(), TRAINER_STATE: json_bytes(trainer)}
    if "curriculum" in parts:
        files[CURRICULUM_STATE] = json_bytes(parts["curriculum"])
    return files


def _reference(run: Run) -> dict[str, Tensor] | None:
    """Return the whole weights of the reference if a later process could not build it again from the configuration."""
    reference, config = run.trainer.reference, run.config
    if reference is None or config.reference.without_adapter:
        return None
    moves = config.reference.sync_every_n_steps is not None
    trained = config.reference.path is None and config.warm_start.steps > 0
    return reference.whole() if moves or trained else None
