"""Tracking for a training loop of one's own: the functions of `regress.tracking`."""

from __future__ import annotations

import atexit
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from regress.credential_redaction import redacted_tree
from regress.dump.metrics_file import (
    METRICS,
    SEGMENT,
    SEQUENCE,
    STEP,
    Row,
    read_rows,
    valid_rows,
)
from regress.engine.run_files import writing
from regress.engine.tracking.metrics_log import VERSION, TrackedLog, Value
from regress.engine.tracking.run_identity import Wishes
from regress.engine.tracking.tracker_availability import chosen_trackers
from regress.engine.tracking.tracker_state import read_sync_state
from regress.errors import RegressError

_manager: WandBSyncManager | None = None
_lock = threading.Lock()


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)


def _to_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


class WandBSyncManager:
    """Metrics of any trainer: ``metrics.jsonl`` in ``output_dir``, and trackers that can neither stop nor slow it.

    ``step`` is the trainer's own. It is never shifted to fit a tracker: the value goes to wandb on an axis of its own,
    so that a resume from an older step loses nothing. Methods may be called from several threads.
    """

    def __init__(
        self,
        output_dir: str | Path,
        project_name: str | None = None,
        run_name: str | None = None,
        *,
        trackers: Sequence[str] | None = None,
        run_id: str | None = None,
        log_dir: str | None = None,
        force_new_run: bool = False,
        config: Mapping[str, Any] | None = None,
        queue_size: int = 1000,
        finish_timeout: float = 30.0,
        warn: Callable[[str], None] = _to_stderr,
    ) -> None:
        """Prepare the log; nothing is written before the first values.

        Args:
            output_dir: directory of the metrics, the state and the backups; it is made if need be. What it holds of an
                earlier process of the run is continued.
            project_name: project in the trackers; ``None``: ``WANDB_PROJECT`` for wandb, else the directory's name.
            run_name: name of the run; ``None``: the directory's name.
            trackers: names that accelerate knows; ``None``: wandb if it is installed and has a login, else
                tensorboard, else none.
            run_id: id of the run; ``None``: ``WANDB_RUN_ID``, else that of the earlier process, else a new one.
            force_new_run: begin a new run in the trackers.
            config: settings of the run, for the trackers.
            warn: called with one sentence at the first failure of a tracker.

        Raises:
            ConfigError: if a tracker that is named is unknown, not installed or has no login.
            RegressError: if the directory cannot be written.
            DumpError: if the metrics there are damaged.
        """
        self._folder = Path(output_dir)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._warn = warn
        self._guard = threading.RLock()
        wishes = Wishes(
            name=self._folder.resolve().name,
            output_dir=self._folder,
            project=project_name,
            run_name=run_name,
            run_id=run_id,
            log_dir=log_dir,
            force_new_run=force_new_run,
            settings={name: _scalar(value) for name, value in redacted_tree(dict(config or {})).items()},
        )
        names = chosen_trackers(trackers, warn)
        self._make = lambda: TrackedLog(
            wishes, names, warn=warn, queue_size=queue_size, finish_timeout=finish_timeout
        )
        self._log = self._make()
        self._offset: int | None = None
        self._failed = False
        self._continue()

    def _continue(self) -> None:
        """Go on with the run that an earlier process has left in the directory."""
        state = read_sync_state(self._folder)
        if state is not None and state.get("run_id") is not None and (self._folder / METRICS).exists():
            rows = valid_rows(read_rows(self._folder / METRICS, self._warn))
            last = max((row[STEP] for row in rows), default=-1)
            self._go_on(state["run_id"], rows, last + 1)

    def _go_on(self, run_id: str, known: Sequence[Row], step: int) -> None:
        """Begin a segment at a step, after the rows that stay valid."""
        self._log = self._make()
        sequence = max((row[SEQUENCE] for row in known), default=-1)
        segment = max((row[SEGMENT] for row in known), default=0)
        self._log.load_state_dict(
            {"schema_version": VERSION, "segment": segment, "sequence": sequence, "run_id": run_id}
        )
        self._log.resumed(f"step {step}", step=step, update=0)

    def safe_log(self, data: Mapping[str, Value], step: int, *, commit: bool = True) -> bool:
        """Log values of a step; never raises and never waits for a tracker.

        Several calls for one step are all kept, whatever ``commit`` is: each is a record of its own, so it is there for
        the signature of ``wandb.log`` only.

        Returns:
            False if the values could not be written to ``metrics.jsonl``; the first time, a sentence says why.
        """
        with self._guard:
            try:
                self._log.log(data, step=step)
            except RegressError as error:
                if not self._failed:
                    self._warn(str(error))
                self._failed = True
                return False
        return True

    def update_step_offset(self, trainer_step: int) -> int:
        """Set the step at which the trainer goes on, after it has loaded a checkpoint.

        What was logged at this step or later is made again and no longer counts (a new segment starts); nothing else is
        changed, and no logged step is ever shifted.

        Returns:
            The steps by which the log was ahead of the trainer.

        Raises:
            RegressError: if the directory cannot be written.
        """
        with self._guard:
            path = self._folder / METRICS
            rows = valid_rows(read_rows(path, self._warn)) if path.exists() else []
            last = max((row[STEP] for row in rows), default=-1)
            self._offset = max(0, last + 1 - trainer_step)
            if self._offset:
                run_id = self._log.state_dict()["run_id"]
                self._log.finish()
                self._go_on(run_id, [row for row in rows if row[STEP] < trainer_step], trainer_step)
            return self._offset

    def get_sync_status(self) -> dict[str, Any]:
        """Return run id, last step, segment, and for each tracker its state: rows taken, waiting, backed up, lost."""
        with self._guard:
            return {**self._log.status(), "offset": self._offset, "output_dir": str(self._folder)}

    def save_state(self) -> Path:
        """Write ``wandb_sync_state.json`` now, and return its path.

        Raises:
            RegressError: if it cannot be written.
        """
        with self._guard, writing(self._folder):
            return self._log.save_state()

    def finish(self) -> None:
        """Give the trackers the time of ``finish_timeout`` to take what waits; call it at the end of the training."""
        with self._guard, suppress(RegressError):
            self._log.finish()
            self.save_state()


def initialize_wandb_sync_manager(
    output_dir: str | Path, project_name: str | None = None, run_name: str | None = None, **options: Any
) -> WandBSyncManager:
    """Make the manager of this process, after finishing the one before; ``options`` are those of the class.

    Raises:
        ConfigError: as the class does.
    """
    global _manager
    with _lock:
        if _manager is not None:
            _manager.finish()
            _manager = None
        else:
            atexit.register(_finish)
        _manager = WandBSyncManager(output_dir, project_name, run_name, **options)
        return _manager


def _finish() -> None:
    """Finish the manager of this process at its end, for a program that does not."""
    if _manager is not None:
        _manager.finish()


def get_wandb_sync_manager() -> WandBSyncManager | None:
    """Return the manager of this process, or ``None`` before `initialize_wandb_sync_manager`."""
    return _manager


def safe_wandb_log(data: Mapping[str, Value], step: int, commit: bool = True) -> bool:
    """Log values with the manager of this process; returns False if there is none, or it could not write them."""
    manager = get_wandb_sync_manager()
    return manager is not None and manager.safe_log(data, step, commit=commit)


def update_step_offset(trainer_step: int) -> int:
    """Give the manager of this process the step at which the trainer goes on, and return by how much the log was ahead.

    Raises:
        RegressError: if there is no manager.
    """
    manager = get_wandb_sync_manager()
    if manager is None:
        raise RegressError(
            "there is no sync manager yet; call initialize_wandb_sync_manager(output_dir) first"
        )
    return manager.update_step_offset(trainer_step)
