"""Sending recorded metrics to a tracker after the run: what it lacks, or the whole run as a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.dump.metrics_file import METRICS, SEQUENCE, Notice, Row, read_metrics, read_rows, valid_rows
from regress.engine.tracking.run_identity import Target, Wishes, find_target
from regress.engine.tracking.tracker_availability import chosen_trackers
from regress.engine.tracking.tracker_backends import make_backend
from regress.engine.tracking.tracker_backup import Backup
from regress.engine.tracking.tracker_state import acknowledge, read_sync_state
from regress.errors import RegressError, TrackingError, reason


@dataclass(frozen=True)
class Replayed:
    """Rows that a tracker took, and the run that it holds them in."""

    sent: int
    run_id: str
    project: str
    whole: bool


def replay(
    run: Path,
    tracker: str,
    *,
    notice: Notice,
    whole: bool | None = None,
    project: str | None = None,
    run_name: str | None = None,
    run_id: str | None = None,
    log_dir: str | None = None,
) -> Replayed:
    """Send metrics of a run to a tracker, one row after the other, without a queue: a failure is told at once.

    Args:
        run: output directory of the run, which is not running.
        whole: every step and update, once, to a new run; or only what the tracker lacks, to the run that it has.
            ``None``: what it lacks if it took part in the run, else everything.
        project: as in section ``tracking``, as the names that follow; ``None``: that of the run.

    Raises:
        RegressError: if there is nothing to send from, or the tracker fails; rows that it took are not sent again.
        ConfigError: if the tracker cannot be used here.
    """
    chosen_trackers([tracker], notice)
    state = read_sync_state(run) or {"trackers": {}}
    entry = state["trackers"].get(tracker)
    if whole is False and entry is None:
        raise RegressError(
            f"{tracker} took no part in the run {run}, so nothing tells what it lacks; give --all"
        )
    whole = entry is None if whole is None else whole
    wishes = Wishes(
        name=state.get("name") or run.resolve().name,
        output_dir=run,
        project=project or state.get("project"),
        run_name=run_name or state.get("run_name"),
        run_id=run_id,
        log_dir=log_dir,
        force_new_run=whole and run_id is None,
    )
    known = None if entry is None else entry["run_id"]
    target = find_target(wishes, known_id=known, segment=0, step=0, update=0)
    rows = read_metrics(run / METRICS, notice) if whole else _lacking(tracker, run, entry or {}, notice)
    sent, why = _send(tracker, target, rows)
    if not whole:
        backup = Backup(run)
        for row in sent:
            backup.remove(tracker, row)
    if len(sent) < len(rows):
        raise TrackingError(f"{tracker} took {len(sent)} of {len(rows)} rows{why}; mend it and send again")
    if not whole and rows:
        acknowledge(run, tracker, max(row[SEQUENCE] for row in rows))
    return Replayed(len(sent), target.run_id, target.project, whole)


def _lacking(tracker: str, run: Path, entry: Mapping[str, Any], notice: Notice) -> list[Row]:
    """Return the valid rows in the backup, and those that were logged after the last that the tracker took."""
    valid = valid_rows(read_rows(run / METRICS, notice))
    kept = {row[SEQUENCE] for row in Backup(run).rows(tracker)}
    return [row for row in valid if row[SEQUENCE] in kept or row[SEQUENCE] > entry.get("acknowledged", -1)]


def _send(tracker: str, target: Target, rows: Sequence[Row]) -> tuple[list[Row], str]:
    """Return the rows that a tracker took for good, and why it did not take the others."""
    sent: list[Row] = []
    why = ""
    if not rows:
        return sent, why
    backend = make_backend(tracker, target)
    try:
        backend.open()
        for row in rows:
            backend.send(dict(row))
            sent.append(row)
    except Exception as error:
        why = f" ({reason(error)})"
    try:
        backend.close()
    except Exception as error:  # what it was given may not have arrived
        return [], why or f" ({reason(error)})"
    return sent, why
