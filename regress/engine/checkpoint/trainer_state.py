"""State of a run in a checkpoint, as far as it is not a tensor. Loads no torch.

``trainer_state.json`` tells of it under the names that users of Hugging Face's Trainer know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from regress.dump.canonical_json import loads, plain, tag_floats
from regress.dump.dump_location import Location, location, read_bytes
from regress.engine.checkpoint.checkpoint_manifest import verify
from regress.engine.checkpoint.checkpoint_names import STATE, checkpoint_name
from regress.engine.config.config_schema import Config
from regress.errors import CheckpointError
from regress.untrusted_files import DOCUMENT

SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)
"""Schemas of ``regress_state.json``; that of schema 1 has the same content, and lies beside a dump of the tensors."""


@dataclass(frozen=True)
class UpdateOutcome:
    """One update of an unfinished step.

    Attributes:
        learning_rate: the one it was made with.
        outcome: fields of `regress.engine.training_step.StepOutcome`; of a metric its sum, count and kind.
    """

    learning_rate: float
    outcome: dict[str, Any]


@dataclass(frozen=True)
class DumpPosition:
    """Dump that the run writes into: its records so far, as a number and a digest of their names and hashes."""

    directory: str
    files: int
    digest: str


@dataclass(frozen=True)
class CheckpointState:
    """Facts that a checkpoint holds besides its tensors.

    Attributes:
        path: directory of the checkpoint.
        step: completed rollout steps.
        update: completed optimizer updates.
        updates_in_step: those among them that belong to the next step, which is unfinished if there are any.
        config: dotted key -> value of the resolved configuration, without credentials.
        world_size: number of ranks.
        mesh: extent of each parallel dimension.
        scheduler: state of the learning-rate schedule.
        segment: number of the part of the run that wrote it.
        sequence: number of the last row of metrics.jsonl when its state was taken; -1: none.
        parts: state of each stateful part of the run by name, and the tokenizer's fingerprint.
        pass_rates: held-out pass rate by step.
        outcomes: updates of the unfinished step.
        dumps: dumps that the run writes into, by the section of the configuration that asks for them.
        optimizer: settings of the optimizer's state that are not tensors, by ``<parameter>/<state>``.
        has_reference: True if the checkpoint holds the reference model.
        environment: determinism environment.
        versions: package -> version.
        provenance: anything else that is known of the run's origin.
    """

    path: Location
    step: int
    update: int
    updates_in_step: int
    config: dict[str, Any]
    world_size: int
    mesh: dict[str, int]
    scheduler: dict[str, Any]
    segment: int
    sequence: int
    parts: dict[str, Any] = field(default_factory=dict)
    pass_rates: dict[int, float] = field(default_factory=dict)
    outcomes: list[UpdateOutcome] = field(default_factory=list)
    dumps: dict[str, DumpPosition] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    has_reference: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of ``regress_state.json``."""
        tree: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        tree |= {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "path"}
        tree["pass_rates"] = {str(step): rate for step, rate in self.pass_rates.items()}
        tree["outcomes"] = [vars(outcome) for outcome in self.outcomes]
        tree["dumps"] = {name: vars(found) for name, found in self.dumps.items()}
        text = json.dumps(
            tag_floats(plain(tree, STATE)), indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False
        )
        return f"{text}\n".encode()


def read_state(path: str | Location) -> CheckpointState:
    """Return the state of a checkpoint after verifying the hash of each of its files.

    Raises:
        CheckpointError: in one sentence, if it is missing, incomplete, damaged or of another release.
    """
    folder = location(path)
    files = verify(folder)
    if STATE not in files:
        raise CheckpointError(
            f"{folder} has no {STATE}, so regress did not write it; give a folder named checkpoint-<step> of a run"
        )
    return parse_state(folder)


def parse_state(folder: Location) -> CheckpointState:
    """Return the state of a checkpoint from ``regress_state.json`` alone; nothing is verified.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    path = folder / STATE
    try:
        return _from_json(folder, loads(read_bytes(path, DOCUMENT)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"{path} is damaged ({why}); copy the checkpoint again, or resume from another one"
        ) from None


def _from_json(folder: Location, tree: Any) -> CheckpointState:
    if not isinstance(tree, dict):
        raise TypeError("it is not a JSON object")
    if tree.get("schema_version") not in READABLE:
        raise ValueError(f"schema version {tree.get('schema_version')}, this release reads {SCHEMA_VERSION}")
    found = {spec.name: tree[spec.name] for spec in fields(CheckpointState) if spec.name != "path"}
    for name in ("step", "update", "updates_in_step", "world_size", "segment"):
        if type(found[name]) is not int or found[name] < 0:
            raise ValueError(f"{name} is {found[name]!r} and no number that counts")
    for name in ("config", "mesh", "scheduler", "parts", "pass_rates", "dumps", "optimizer", "environment"):
        if not isinstance(found[name], Mapping):
            raise TypeError(f"{name} is not a JSON object")
    if type(found["sequence"]) is not int or type(found["has_reference"]) is not bool:
        raise TypeError("sequence or has_reference is of another type")
    found["pass_rates"] = {int(step): float(rate) for step, rate in found["pass_rates"].items()}
    found["outcomes"] = [UpdateOutcome(**row) for row in found["outcomes"]]
    found["dumps"] = {name: DumpPosition(**row) for name, row in found["dumps"].items()}
    if len(found["outcomes"]) != found["updates_in_step"]:
        raise ValueError(
            f"it tells of {found['updates_in_step']} updates in a step and has outcomes of {len(found['outcomes'])}"
        )
    return CheckpointState(folder, **found)


def local_copy(path: str | Location, folder: Path) -> Path:
    """Return a checkpoint's directory on this machine; one in a store is copied to a folder first.

    Raises:
        CheckpointError: if it is incomplete.
        DumpError: if the store cannot be read.
    """
    place = location(path)
    if isinstance(place, Path):
        return place
    from regress.dump.dump_manifest import MANIFEST
    from regress.engine.checkpoint.checkpoint_manifest import read_manifest

    for name in (*read_manifest(place), MANIFEST):
        source: Any = place
        for part in name.split("/"):
            source = source / part
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return folder


PASS_RATE = "eval_avg_test_pass_rate"


def trainer_state(config: Config, state: CheckpointState, problems: int | None) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``; ``problems`` are those of an epoch, None if nobody knows.

    ``global_step``, ``max_steps``, ``eval_steps``, ``save_steps`` and the ``step`` of the rows in ``log_history``
    count optimizer updates, as Hugging Face's do; ``step`` at the top counts completed rollout steps.
    """
    each = config.updates_per_rollout
    data, chosen = config.data, config.trainer
    best = max(state.pass_rates, key=lambda step: (state.pass_rates[step], step), default=None)
    saved = best is not None and chosen.save_steps is not None and best and best % chosen.save_steps == 0
    epoch = data.prompts_per_step / problems if problems else 0.0
    return {
        "best_global_step": None if best is None else best * each,
        "best_metric": None if best is None else state.pass_rates[best],
        "best_model_checkpoint": checkpoint_name(best) if best is not None and saved else None,
        "epoch": state.step * epoch,
        "eval_steps": config.evaluation.every_n_steps * each,
        "global_step": state.update,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [
            {"epoch": step * epoch, "step": step * each, "rollout_step": step, PASS_RATE: rate}
            for step, rate in sorted(state.pass_rates.items())
        ],
        "logging_steps": each,
        "max_steps": config.max_steps * each,
        "num_train_epochs": config.max_steps * epoch,
        "save_steps": chosen.save_updates or (chosen.save_steps or config.max_steps) * each,
        "step": state.step,
        "train_batch_size": chosen.mini_batch_size or data.prompts_per_step * data.group_size,
    }


def json_bytes(tree: Any) -> bytes:
    """Return strict JSON for people and programs."""
    text = json.dumps(tag_floats(plain(tree, "state")), indent=2, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()
