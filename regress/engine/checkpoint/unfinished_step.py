"""Unfinished step as records, and back: its rollout, and what was computed before its first update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regress.dump.coordinates import Coordinates
from regress.dump.numpy_arrays import Array, to_torch
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record, to_record
from regress.engine.checkpoint.trainer_state import UpdateOutcome
from regress.engine.grpo_trainer import MiniBatch, RecordedTokens, Trainer, UnfinishedStep
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.engine.training_step import StepOutcome
from regress.errors import CheckpointError
from regress.grpo.update_metrics import Metric
from regress.layout import BatchPlan

_HOMES = {
    "old_log_probs": ("old_log_probs",),
    "ref_log_probs": ("ref_log_probs",),
    "is_loss_debug": ("advantages", "correction"),
}
"""Quantities that the record of each type holds."""
_METRIC = "$metric"
_KEPT = "kept"
"""Tokens that rejection kept, beside the old log-probs that decided it."""


def records_of(work: UnfinishedStep, step: int, meta: Mapping[str, Any]) -> list[Record]:
    """Return the records of an unfinished step: trajectories, and quantities of its loss, right padded.

    Args:
        meta: metadata of recorded trajectories.
    """
    records = [to_record(work.trajectories, step, meta)]
    whole = _whole([mini.batch for mini in work.minis])
    layout = {"layout": whole.layout.to_json(), "samples": [[*key] for key in whole.samples_of(whole.layout)]}
    for type, names in _HOMES.items():
        found = {}
        for name in names:
            values = [getattr(mini.tokens, name) for mini in work.minis]
            if all(value is not None for value in values):
                found[name] = whole.scatter(torch.cat(values).detach().cpu())
        if "old_log_probs" in found and any(mini.rejected for mini in work.minis):
            found[_KEPT] = whole.response_mask
        if found:
            records.append(Record.of(type, Coordinates(step), found, layout))
    return records


def outcomes_of(work: UnfinishedStep) -> list[UpdateOutcome]:
    """Return the updates of an unfinished step as values of JSON."""
    return [
        UpdateOutcome(learning_rate, {name: _json(value) for name, value in vars(outcome).items()})
        for outcome, learning_rate in zip(work.outcomes, work.learning_rates, strict=True)
    ]


def _json(value: Any) -> Any:
    if isinstance(value, Metric):
        return {_METRIC: [value.total, value.count, value.kind]}
    return {name: _json(item) for name, item in value.items()} if isinstance(value, dict) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {_METRIC}:
        return Metric(*value[_METRIC])
    return {name: _from_json(item) for name, item in value.items()}


def restored(
    trainer: Trainer, records: Mapping[str, Record], made: Sequence[UpdateOutcome], stated: str
) -> UnfinishedStep:
    """Return the unfinished step of a checkpoint, laid out as this run's ranks and microbatches are.

    Args:
        records: those that `records_of` made, by their types.
        stated: name of the checkpoint, for errors.

    Raises:
        CheckpointError: if a record of it is missing.
        DumpError: if one is damaged.
        ReplayError: if it does not fit the objective.
    """
    needed = {"tokens": ("trajectory", "tokens"), "advantages": ("is_loss_debug", "advantages")}
    if trainer.objective.corrects_over_rollout and "old_log_probs" in records:
        needed["sampler weights"] = ("is_loss_debug", "correction")  # an earlier release did not keep them
    for what, (type, name) in needed.items():
        if type not in records or name not in records[type].tensors:
            raise CheckpointError(
                f"{stated} lacks the {what} of its unfinished step; resume from another checkpoint"
            )
    trajectories = from_record(records["trajectory"])
    kept = _kept(records, trajectories)
    masks = trainer.loss_masks(trajectories) if kept is None else kept
    whole = _whole([TokenBatch(trajectories, loss_masks=masks)])
    known = {
        name: _flat(whole, records[type].tensors[name], name)
        for type, names in _HOMES.items()
        for name in names
        if type in records and name in records[type].tensors
    }
    tokens = RecordedTokens(
        known["advantages"], known.get("old_log_probs"), known.get("ref_log_probs"), known.get("correction")
    )
    minis: list[MiniBatch] = trainer.restored_mini_batches(trajectories, tokens, kept)
    outcomes = [
        StepOutcome(**{name: _from_json(value) for name, value in row.outcome.items()}) for row in made
    ]
    return UnfinishedStep(trajectories, minis, outcomes, [row.learning_rate for row in made])


def _kept(records: Mapping[str, Record], trajectories: Sequence[Trajectory]) -> list[list[int]] | None:
    """Return the tokens that rejection kept, one list per sample; None if nothing was rejected."""
    rows = records["old_log_probs"].tensors.get(_KEPT) if "old_log_probs" in records else None
    if rows is None:
        return None
    return [
        [int(value) for value in row[: len(one.tokens)]] for row, one in zip(rows, trajectories, strict=True)
    ]


def _whole(batches: Sequence[TokenBatch]) -> Microbatch:
    """Return all samples as one right-padded microbatch on the CPU."""
    trajectories = [trajectory for batch in batches for trajectory in batch.trajectories]
    masks = [mask for batch in batches for mask in batch.loss_masks]
    (whole,) = TokenBatch(trajectories, loss_masks=masks).microbatches(BatchPlan())
    return whole


def _flat(whole: Microbatch, array: Array, name: str) -> Tensor:
    """Return the ``[K]`` values of the loss tokens from a record's ``[N, T]`` tensor."""
    values = to_torch(array.copy())
    if tuple(values.shape) != tuple(whole.place.targets.shape):
        raise CheckpointError(f"""{name} of the unfinished step has shape {list(values.shape)} and its trajectories ask
        for {list(whole.place.targets.shape)}; resume from another checkpoint""")
    return values.reshape(-1)[whole.local]
