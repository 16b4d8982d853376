"""Export of a golden case for another trainer: plain files that need nothing of this package to be read."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from regress.dump.canonical_json import Json
from regress.dump.dump_files import file_stamp, sync_folder
from regress.dump.dump_reader import read
from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.engine.adapters.adapter_settings import base_of
from regress.engine.config.config_schema import Config
from regress.engine.optimizer import adamw, build_scheduler
from regress.errors import GoldenError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_files import unwritable
from regress.replay.export_documents import INDEX
from regress.replay.export_objective import objective_of
from regress.replay.export_readme import readme
from regress.replay.exported_case import FORMAT
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

DERIVED = {"advantages": "advantages", "token_weights": "weights"}
"""Field of a file below ``derived/`` -> golden quantity and tensor."""
GIVEN = {"old_log_probs": "old_log_probs", "ref_log_probs": "ref_log_probs"}
"""Field of a file below ``rollouts/`` -> golden quantity."""


def export_case(
    case: GoldenCase, folder: str | Path, *, derived: bool = True, overwrite: bool = False
) -> Path:
    """Write a golden case as plain files: checkpoints, optimizer state, rollouts as JSONL, and ``objective.json``.

    The folder appears whole or not at all. Its README.md explains every file and formula.

    Args:
        case: recorded, with its inputs unchanged.
        folder: does not exist yet, or is empty.
        derived: write advantages and token weights, too, which follow from the rest.
        overwrite: replace an earlier export.

    Returns:
        The folder.

    Raises:
        GoldenError: if the case is none, damaged or not recorded, or the folder holds something else.
    """
    target = Path(folder)
    if not isinstance(case, GoldenCase):
        raise GoldenError(
            f"{case!r} is not a GoldenCase: give GoldenStore('golden').case('dense'), or the like"
        )
    if case.manifest is None:
        raise GoldenError(f"{case.folder} is not recorded yet: run regress golden record {case.name}")
    case.verify_inputs()
    _require_free(target, overwrite)
    with _replacing(target) as place:
        _write(case, place, derived)
    return target


def _require_free(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise GoldenError(f"{target} is a file: give a folder that does not exist yet")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise GoldenError(f"{target} is not empty: give another folder, or --overwrite to replace an export")
    if not (target / INDEX).is_file():
        raise GoldenError(
            f"{target} holds no export of a case, so --overwrite spares it: give another folder"
        )


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces ``target`` on success, and is removed on failure."""
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        place = Path(mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    except OSError as error:
        raise unwritable(target, error) from error
    place.chmod(0o777 & ~_umask())
    try:
        yield place
        sync_folder(place)
        if target.exists():
            old = place.with_name(f"{place.name}-old")
            target.rename(old)
            place.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            place.rename(target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(case: GoldenCase, place: Path, derived: bool) -> None:
    steps = case.trajectories()
    with Workspace() as temporary:
        config = replay_config(case, BASE, Precision.FLOAT64, len(steps), temporary)
    if config.algorithm.loss_function is not None:
        raise GoldenError(f"""{case.folder} has a loss that is code
        (algorithm.loss_function={config.algorithm.loss_function}), which objective.json cannot tell; export a case with
        a loss of this package""")
    plan = Replay(case, BASE, Precision.FLOAT64).plan
    objective: dict[str, Json] = {
        "case": case.name,
        **objective_of(config, plan, learning_rates(config, len(plan))),
    }
    _copy(case.folder / "model", place / "model")
    if config.algorithm.needs_reference:
        _copy(_reference(case, config), place / "reference")
    objective["optimizer_steps"] = _optimizer(case, place)
    for step, trajectories in steps.items():
        updates = [update for update in plan if update.step == step]
        values = {update.where: _values(case, update, config, GIVEN) for update in updates}
        rows = [_rollout(t, [values[update.where] for update in updates], config) for t in trajectories]
        _lines(place / "rollouts" / f"step_{step:06d}.jsonl", rows)
    for update in plan if derived else ():
        found = _values(case, update, config, DERIVED)
        trajectories_by_key = {t.key: t for t in steps[update.step]}
        rows = [_derived(trajectories_by_key[key], found[key], config) for key in update.frame.samples]
        _lines(place / "derived" / f"{update.where}.jsonl", rows)
    _json(place / "objective.json", objective)
    (place / "README.md").write_text(readme(case, config, objective, derived), encoding="utf-8")
    files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    stamps = {name: file_stamp(place / name).sha256 for name in files}
    index = {"format": FORMAT, "case": case.name, "derived": derived, "sha256": stamps}
    _json(place / INDEX, index)


def learning_rates(config: Config, count: int) -> list[float]:
    """Return the learning rate of each of the first ``count`` updates, as the schedule gives it."""
    optimizer = adamw([("p", nn.Parameter(torch.zeros(1)))], config.optimizer.learning_rate)
    scheduler = build_scheduler(optimizer, config.optimizer, updates=count)
    found = []
    for _ in range(count):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def _reference(case: GoldenCase, config: Config) -> Path:
    """Return the folder of the reference model: its own, the model's, or that of the model under its adapter."""
    model, own = case.folder / "model", case.folder / "reference"
    if config.reference.without_adapter:
        return base_of(model, config.model.lora.base_path, "model.path")
    return own if own.is_dir() else model


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)


def _optimizer(case: GoldenCase, place: Path) -> Json:
    """Write the moments; return parameter -> number of earlier updates, None where the state is cold."""
    path = case.folder / "optimizer.safetensors"
    if not path.is_file():
        return None
    tensors = read(path).tensors
    moments = {name: np.ascontiguousarray(value) for name, value in tensors.items() if value.ndim}
    moments |= {n: v for n, v in tensors.items() if not v.ndim and not n.endswith("/step")}
    save_file(moments, place / "optimizer.safetensors")
    return {n.removesuffix("/step"): int(v) for n, v in tensors.items() if n.endswith("/step")}


_Own = Mapping[str, Sequence[float]]
"""Field -> values of one sample's tokens."""


def _values(
    case: GoldenCase, update: PlannedUpdate, config: Config, sources: Mapping[str, str]
) -> dict[tuple[str, int], _Own]:
    """Return the golden values of some quantities, by sample."""
    recorded = case.quantities(update.where)
    found: dict[str, Array] = {
        field: case.truth_of(update.where, quantity)[quantity]
        for field, quantity in sources.items()
        if quantity in recorded
    }
    if config.algorithm.old_log_probs == "current":
        found.pop("old_log_probs", None)
    bounds = update.frame.offsets
    return {
        key: {field: values[bounds[i] : bounds[i + 1]].tolist() for field, values in found.items()}
        for i, key in enumerate(update.frame.samples)
    }


def _rollout(
    trajectory: Trajectory, updates: Sequence[Mapping[tuple[str, int], _Own]], config: Config
) -> dict[str, Any]:
    start = trajectory.prompt_length
    own = next(found[trajectory.key] for found in updates if trajectory.key in found)
    mask, loss = trajectory.loss_mask[start:], _loss_tokens(trajectory, config)
    sampler = None if trajectory.log_probs is None else trajectory.log_probs.astype(np.float64).tolist()
    given = {
        "sampler_log_probs": None if sampler is None else _where(sampler[start:], mask),
        **{field: _where(own[field][start:], loss) if field in own else None for field in GIVEN},
    }
    return {
        "group_id": trajectory.group_id,
        "run_id": trajectory.run_id,
        "prompt_ids": trajectory.tokens[:start],
        "completion_ids": trajectory.tokens[start:],
        "loss_mask": mask,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        **given,
        "rewards": trajectory.rewards,
        "prompt": trajectory.prompt,
        "response": trajectory.response,
    }


def _loss_tokens(trajectory: Trajectory, config: Config) -> list[int]:
    """Return the mask of the completion's tokens that enter the loss."""
    mask = trajectory.loss_mask[trajectory.prompt_length :]
    dropped = config.algorithm.mask_truncated_completions and trajectory.finish_reason == "length"
    return [0] * len(mask) if dropped else mask


def _derived(trajectory: Trajectory, own: _Own, config: Config) -> dict[str, Any]:
    start = trajectory.prompt_length
    loss = _loss_tokens(trajectory, config)
    values = {field: _where(found[start:], loss) for field, found in own.items()}
    return {"group_id": trajectory.group_id, "run_id": trajectory.run_id, **values}


def _where(values: Sequence[float], mask: Sequence[int]) -> list[float | None]:
    """Return the values at the loss tokens; None elsewhere, and where the sampler recorded none."""
    return [
        value if chosen and math.isfinite(value) else None for value, chosen in zip(values, mask, strict=True)
    ]


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
