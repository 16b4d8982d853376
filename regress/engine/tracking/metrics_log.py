"""Log of a run: one row a call, to ``metrics.jsonl`` first and then to the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from regress.credential_redaction import redacted_tree
from regress.dump.metrics_file import (
    METRICS,
    SEQUENCE,
    STEP,
    UPDATE,
    MetricsWriter,
    Row,
    read_rows,
    valid_rows,
)
from regress.engine.config import flat
from regress.engine.config.config_schema import Config
from regress.engine.run_files import writing
from regress.engine.tracking.run_identity import Target, Wishes, find_target
from regress.engine.tracking.tracker_availability import chosen_trackers
from regress.engine.tracking.tracker_backends import make_backend
from regress.engine.tracking.tracker_backup import Backup
from regress.engine.tracking.tracker_queue import Channel, Delivery
from regress.engine.tracking.tracker_state import SyncState, read_sync_state
from regress.errors import RegressError

Value = float | int | str | None
VERSION = 1


class Log(AbstractContextManager["Log"]):
    """Destination of metrics, and the part of a checkpoint that continues it; this one keeps nothing."""

    def log(self, metrics: Mapping[str, Value], *, step: int, update: int | None = None) -> None:
        """Log values of a rollout step, or of one optimizer update (counted over the whole run)."""

    def resumed(self, checkpoint: str, *, step: int, update: int) -> None:
        """Record the name of the checkpoint that the run goes on from, and its completed steps and updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds; called before the first row."""

    def __exit__(self, *_: Any) -> None:
        """End the log."""


class TrackedLog(Log):
    """Log that writes ``metrics.jsonl`` and feeds trackers, each through a queue and a thread of its own.

    Only the file can fail: it is the record of the run. Nothing is written, and no tracker is opened, before the first
    row, so that a run that is refused leaves those of an earlier one alone.
    """

    def __init__(
        self,
        wishes: Wishes,
        trackers: Sequence[str],
        *,
        warn: Callable[[str], None],
        queue_size: int = 1000,
        finish_timeout: float = 30.0,
        anew: bool = False,
    ) -> None:
        """Prepare the log in ``wishes.output_dir``, which exists; ``anew`` replaces a file that is there.

        Raises:
            DumpError: if the metrics file there is damaged.
        """
        self._wishes = wishes
        self._names = list(trackers)
        self._warn = warn
        self._size = queue_size
        self._timeout = finish_timeout
        self._path = wishes.output_dir / METRICS
        self._start: dict[str, Any] = {
            "resumed_from": None,
            "step": 0,
            "update": 0,
            "after": -1,
            "segment": 0,
        }
        self._known_id: str | None = None
        self._anew = anew
        self._writer = MetricsWriter(self._path, anew=anew)
        self._target: Target | None = None
        self._channels: list[Channel] = []
        self._last: Row = {}
        self._opened = False
        self._sync = SyncState(wishes.output_dir, self.status)

    def log(self, metrics: Mapping[str, Value], *, step: int, update: int | None = None) -> None:
        """Append one row to the file, and hand it to the trackers; returns before they have it.

        Raises:
            RegressError: if the file cannot be written, or a value is not a number or text.
        """
        with writing(self._wishes.output_dir):
            self._open()
            row = self._writer.write(metrics, step=step, update=update)
        self._last = {**self._last, **{name: row[name] for name in (STEP, UPDATE, SEQUENCE) if name in row}}
        for channel in self._channels:
            channel.put(row)

    def resumed(self, checkpoint: str, *, step: int, update: int) -> None:
        """Start the next segment at a checkpoint; `load_state_dict` gives the rest of its state."""
        self._start |= {"resumed_from": checkpoint, "step": step, "update": update}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the metrics file and the run id, for a checkpoint of this moment."""
        if self._target is None:
            self._target = self._found_target()
        if self._opened:  # until then the file tells what the trackers of an earlier process have taken
            self._sync.changed(True)
        return {
            "schema_version": VERSION,
            "segment": self._writer.segment,
            "sequence": self._writer.sequence,
            "run_id": self._target.run_id,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the metrics and the trackers' run of a checkpoint.

        Raises:
            RegressError: if the state is of a newer release, or incomplete.
        """
        if state.get("schema_version") != VERSION or not {"segment", "sequence", "run_id"} <= state.keys():
            raise RegressError(f"""the tracking state of the checkpoint has the schema version
            {state.get("schema_version")} and the keys {", ".join(sorted(state))}, but this release reads version
            {VERSION}; use the release that wrote it""")
        self._start |= {"after": state["sequence"], "segment": state["segment"] + 1}
        self._known_id = state["run_id"]
        self._target = None

    def status(self) -> dict[str, Any]:
        """Return the run in the trackers and the state of each delivery, as ``wandb_sync_state.json`` holds it."""
        target = self._target
        return {
            "run_id": None if target is None else target.run_id,
            "name": self._wishes.name,
            "run_name": self._wishes.run_name,
            "project": self._wishes.project,
            "segment": self._writer.segment,
            "sequence": self._writer.sequence,
            "step": self._last.get(STEP),
            "update": self._last.get(UPDATE),
            "resumed_from": self._start["resumed_from"],
            "trackers": {channel.name: channel.delivery() for channel in self._channels},
        }

    def save_state(self) -> Path:
        """Write ``wandb_sync_state.json`` now, and return its path.

        Raises:
            OSError: if it cannot be written.
        """
        if self._target is None:
            self._target = self._found_target()
        return self._sync.save()

    def finish(self) -> None:
        """Give the trackers ``finish_timeout`` seconds together to take what waits; keep the rest in the backup."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + self._timeout
        for channel in self._channels:
            channel.join(deadline)
        self._writer.close()
        if self._channels:
            self._sync.changed(True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # the file of a run without a single row is not that of an earlier run
                with writing(self._wishes.output_dir):
                    self._open()
        finally:
            self.finish()

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        self._writer = MetricsWriter(self._path, **self._start, anew=self._anew)
        target = self._target = replace(self._target or self._found_target(), segment=self._writer.segment)
        known = self._start["resumed_from"] is not None and self._path.exists()  # a run may go on elsewhere
        rows = valid_rows(read_rows(self._path, self._warn)) if known else []
        earlier = self._earlier(target)
        self._writer.start()
        backup = Backup(self._wishes.output_dir)
        for name in self._names:
            delivery = Delivery(target.run_id, acknowledged=earlier.get(name, self._start["after"]))
            channel = Channel(
                name,
                make_backend(name, target),
                delivery,
                size=self._size,
                backup=backup,
                warn=self._warn,
                changed=self._sync.changed,
            )
            self._channels.append(channel)
            for row in self._owed(name, rows, earlier, target):
                channel.put(row)

    def _found_target(self) -> Target:
        return find_target(
            self._wishes,
            known_id=self._known_id,
            segment=self._writer.segment,
            step=self._start["step"],
            update=self._start["update"],
        )

    def _earlier(self, target: Target) -> dict[str, int]:
        """Return what the trackers had taken of the same run when its last process ended or was killed."""
        try:
            state = read_sync_state(self._wishes.output_dir)
        except RegressError as error:
            self._warn(f"{error}; rows that its trackers had not taken are not sent again")
            return {}
        deliveries = {} if state is None else state["trackers"]
        return {
            name: entry.get("acknowledged", -1)
            for name, entry in deliveries.items()
            if entry["run_id"] == target.run_id
        }

    def _owed(self, name: str, rows: list[Row], earlier: Mapping[str, int], target: Target) -> list[Row]:
        """Return the valid rows that a tracker lacks because a kill came first, or because it hides them."""
        if name not in earlier:
            return []
        rows = [row for row in rows if row[SEQUENCE] <= self._start["after"]]
        hidden = name == "tensorboard"  # which hides every row at or after the step where a segment starts
        kept = {row[SEQUENCE] for row in self._backed_up(name)}
        return [
            row
            for row in rows
            if (row[SEQUENCE] > earlier[name] and row[SEQUENCE] not in kept)
            or (hidden and UPDATE not in row and row[STEP] >= target.step)
        ]

    def _backed_up(self, name: str) -> list[Row]:
        try:
            return Backup(self._wishes.output_dir).rows(name)
        except RegressError as error:
            self._warn(str(error))
            return []


def open_log(config: Config, *, main: bool, warn: Callable[[str], None], anew: bool = False) -> Log:
    """Return the log of a run, a context manager that ends it; ranks other than the main one drop what they log.

    ``anew`` replaces the metrics of an earlier run in ``output_dir``.

    Raises:
        ConfigError: if a tracker that ``tracking.trackers`` names is unknown, not installed or has no login.
        DumpError: if the metrics file of an earlier run in ``output_dir`` is damaged.
    """
    if not main:
        return Log()
    keys = asdict(config.tracking)
    names = chosen_trackers(keys.pop("trackers"), warn)
    limits = {name: keys.pop(name) for name in ("queue_size", "finish_timeout")}
    wishes = Wishes(
        name=config.exp_name,
        output_dir=Path(config.output_dir),
        settings=redacted_tree(flat(config)) if names else {},
        **keys,
    )
    return TrackedLog(wishes, names, warn=warn, anew=anew, **limits)
