"""Trackers of accelerate behind one interface; each has its own way to keep a step axis through a resume."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import accelerate.tracking
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from regress.dump.metrics_file import SEGMENT, SEQUENCE, STEP, UPDATE, Row, metrics_of
from regress.engine.tracking.run_identity import Target


class _Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logger of accelerate's trackers that asks for no state of the process.

    accelerate's own raises where nobody has made an Accelerator, and the state itself may join a process group, which
    is not business of a tracker.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Drop the arguments that only accelerate's logger knows."""
        return msg, {
            name: value for name, value in kwargs.items() if name not in ("main_process_only", "in_order")
        }

    def warning_once(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Send it as often as it arrives; it shows only to who asks for accelerate's log."""
        self.warning(message, *args, **kwargs)


class Backend:
    """Any tracker that accelerate knows; a value's step is the update if it has one, else the rollout step.

    A thread of its own opens, feeds and closes it, and any of these may fail or hang.
    """

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.target = target
        self._trackers: list[GeneralTracker] = []

    def open(self) -> None:
        """Begin a run; a tracker without an adapter of its own begins one for each segment."""
        self._start(self._kind()(self.target.project, *self._directory(), **self._options()))

    def send(self, row: Row) -> None:
        """Log the metrics of a row."""
        self._trackers[0].log(numbers(row), step=row.get(UPDATE, row[STEP]))

    def close(self) -> None:
        """Finish every tracker that was opened."""
        for tracker in self._trackers:
            tracker.finish()

    def abandon(self) -> None:
        """Keep the tracker from holding up the end of the process, without waiting: the thread ends with it."""

    def _kind(self) -> Any:
        return LOGGER_TYPE_TO_CLASS[self.name]

    def _start(self, tracker: GeneralTracker, settings: bool = True) -> None:
        accelerate.tracking.logger = _Logger(logging.getLogger("accelerate.tracking"), {})
        tracker.main_process_only = False  # only the main rank has trackers
        tracker.start()
        self._trackers.append(tracker)
        if settings:
            tracker.store_init_configuration(dict(self.target.settings))

    def _directory(self) -> tuple[str, ...]:
        return (str(self.target.directory(self.name)),) if self._kind().requires_logging_directory else ()

    def _options(self) -> dict[str, Any]:
        return {}


class WandBBackend(Backend):
    """wandb: the run of the checkpoint goes on, ``step`` and ``update`` are axes of their own.

    wandb drops what is logged at a step below its own, so no ``step`` is given to it: every row is a record of its
    own with the values of both axes, and each metric is defined to be drawn over its axis.
    """

    def open(self) -> None:
        """Open the run by its id; the user's environment decides what no key does."""
        self._defined: set[str] = set()
        super().open()
        for axis in (STEP, UPDATE, SEGMENT, SEQUENCE):
            self._trackers[0].tracker.define_metric(axis)
            self._defined.add(axis)

    def send(self, row: Row) -> None:
        """Log one record."""
        values = numbers(row)
        axis = UPDATE if UPDATE in row else STEP
        run = self._trackers[0].tracker
        for name in values.keys() - self._defined:
            run.define_metric(name, step_metric=axis)
            self._defined.add(name)
        place = {name: row[name] for name in (STEP, UPDATE, SEGMENT, SEQUENCE) if name in row}
        self._trackers[0].log({**values, **place})

    def abandon(self) -> None:
        """Let a thread wait for wandb in place of the end of the process."""
        threading.Thread(target=_wandb_teardown, name="wandb teardown", daemon=True).start()

    def open_project(self) -> str:
        """Return the project: an explicit key, else ``WANDB_PROJECT``, else the experiment's name."""
        named = os.environ.get("WANDB_PROJECT")
        return named if self.target.project_is_default and named else self.target.project

    def _start(self, tracker: GeneralTracker, settings: bool = True) -> None:
        tracker.run_name = self.open_project()
        super()._start(tracker, settings)

    def _options(self) -> dict[str, Any]:
        import wandb

        target = self.target
        directory = target.log_dir or Path(os.environ.get("WANDB_DIR") or target.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        quiet = {} if "WANDB_CONSOLE" in os.environ else {"settings": wandb.Settings(console="off")}
        return {
            "id": target.run_id,
            "name": target.run_name,
            "resume": target.resume_mode,
            "dir": str(directory),
            **quiet,
        }


class TensorBoardBackend(Backend):
    """TensorBoard: two event directories, since a resume hides all points from one step on, whatever their axis."""

    def open(self) -> None:
        """Open the writers of both axes; what earlier segments wrote from here on is hidden."""
        target = self.target
        again = target.segment > 0
        axes = ("", target.step), ("/updates", target.update)
        for suffix, start in axes:
            purge = {"purge_step": start} if again else {}
            tracker = self._kind()(target.unique_name + suffix, *self._directory(), **purge)
            self._start(tracker, settings=not again and not self._trackers)

    def send(self, row: Row) -> None:
        """Write the values of a row over its axis."""
        updates = UPDATE in row
        self._trackers[updates].log(numbers(row), step=row[UPDATE if updates else STEP])


class TrackioBackend(Backend):
    """trackio: the run of this name and id goes on; it keeps repeated steps as rows, which ``segment`` tells apart."""

    def send(self, row: Row) -> None:
        """Log one record at the value of its axis."""
        place = {name: row[name] for name in (UPDATE, SEGMENT, SEQUENCE) if name in row}
        self._trackers[0].log({**numbers(row), **place}, step=row.get(UPDATE, row[STEP]))

    def _options(self) -> dict[str, Any]:
        return {"name": self.target.unique_name, "resume": "allow", "embed": False}


class SwanLabBackend(Backend):
    """SwanLab: the experiment of this id goes on; it takes texts as a type of their own."""

    def send(self, row: Row) -> None:
        """Log the metrics of a row."""
        import swanlab

        values = {
            name: swanlab.Text(value) if isinstance(value, str) else value
            for name, value in numbers(row).items()
        }
        self._trackers[0].log(values, step=row.get(UPDATE, row[STEP]))

    def _options(self) -> dict[str, Any]:
        directory = self.target.directory(self.name)
        directory.mkdir(parents=True, exist_ok=True)
        return {
            "experiment_name": self.target.run_name,
            "id": self.target.run_id,
            "resume": "allow",
            "logdir": str(directory),
        }


def make_backend(name: str, target: Target) -> Backend:
    """Return the adapter of a tracker that accelerate knows."""
    return ADAPTERS.get(name, Backend)(name, target)


ADAPTERS: dict[str, type[Backend]] = {
    "wandb": WandBBackend,
    "tensorboard": TensorBoardBackend,
    "trackio": TrackioBackend,
    "swanlab": SwanLabBackend,
}


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row, null as the NaN that it was."""
    return {name: float("nan") if value is None else value for name, value in metrics_of(row).items()}


def _wandb_teardown() -> None:
    with suppress(Exception):
        import wandb

        wandb.teardown()
