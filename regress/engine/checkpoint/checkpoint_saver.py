"""Checkpoints of a running loop: when one is due, and its writing beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from regress.dump.dump_location import Location, location
from regress.engine.checkpoint.checkpoint_names import checkpoint_name
from regress.engine.checkpoint.checkpoint_writer import clean, require_empty, write_checkpoint
from regress.engine.checkpoint.run_snapshot import Snapshot, take
from regress.engine.checkpoint.trainer_state import CheckpointState
from regress.engine.engine_ranks import raise_on_all_ranks
from regress.engine.grpo_trainer import UnfinishedStep
from regress.engine.run_construction import Run
from regress.errors import RegressError, reason


class Stopped(RegressError):  # noqa: N818  # it is an end and no mistake
    """The run has ended at a checkpoint, as it was asked to."""


class Saver(AbstractContextManager["Saver"]):
    """Writes the checkpoints of a run, one at a time, from snapshots.

    Leaving the context waits for the one that is being written.

    Args:
        run: the run; all of its ranks make a saver and call its methods together.
        start: checkpoint that the run goes on from.
        stop_after: number of optimizer updates after whose checkpoint the run ends with `Stopped`.
        said: called with a sentence about each finished checkpoint.
        wrote: called with the place of each finished checkpoint, in the thread that trains and before the next one is
            begun, on the rank that writes: completed steps, and the last update if it lies inside a step.

    Raises:
        CheckpointError: if the directory holds checkpoints of another run.
    """

    def __init__(
        self,
        run: Run,
        start: CheckpointState | None = None,
        *,
        stop_after: int | None = None,
        said: Callable[[str], None] = lambda text: None,
        wrote: Callable[[int, int | None], None] = lambda step, update: None,
    ) -> None:
        self._run = run
        self._segment = 0 if start is None else start.segment + 1
        self._said = said
        self._wrote = wrote
        self._written: tuple[int, int | None] | None = None
        self._stop_after = stop_after
        self._config = run.config.trainer
        self._thread: threading.Thread | None = None
        self._failure: RegressError | None = None
        self._home: Location = location(self._config.checkpoint_dir)
        if self.on:
            fresh = self._config.resume_from_checkpoint is None
            raise_on_all_ranks(run.trainer.world, lambda: self._prepare(fresh))

    def _prepare(self, fresh: bool) -> None:
        if not self._run.trainer.world.main:
            return
        clean(self._home)
        if fresh:
            require_empty(self._home)

    @property
    def on(self) -> bool:
        """True if checkpoints are written at all."""
        return self._config.save_steps is not None or self._config.save_updates is not None

    def after_step(self, step: int, pass_rates: Mapping[int, float]) -> None:
        """Write a checkpoint if one is due when ``step`` steps are completed."""
        every, updates = self._config.save_steps, self._config.save_updates
        made = self._run.trainer.updates
        due = every is not None and step % every == 0
        due = due or (updates is not None and made % updates == 0)
        due = due or (self.on and step == self._run.config.max_steps)
        if due and step:
            self.save(step, None, pass_rates)

    def after_update(self, step: int, pass_rates: Mapping[int, float]) -> None:
        """Write a checkpoint if one is due inside a step, of which ``step`` others are completed."""
        every, work = self._config.save_updates, self._run.trainer.unfinished
        if every is None or work is None or self._run.trainer.updates % every:
            return
        if len(work.outcomes) < self._run.config.trainer.epochs * len(work.minis):
            self.save(step, work, pass_rates)

    def save(self, step: int, work: UnfinishedStep | None, pass_rates: Mapping[int, float]) -> None:
        """Take a snapshot and hand it to the writer, after waiting for the one before; all ranks together.

        Raises:
            RegressError: on every rank, if the earlier one could not be written.
            Stopped: if the run was to end here.
        """
        world = self._run.trainer.world
        raise_on_all_ranks(world, self._wait)
        snapshot = take(self._run, step, work, pass_rates, self._segment)
        if snapshot is not None:
            self._thread = threading.Thread(
                target=self._write, args=(snapshot,), name="regress-checkpoint-writer", daemon=False
            )
            self._thread.start()
        if self._run.trainer.updates == self._stop_after:
            self.finish()
            raise Stopped(f"the run has ended after {self._stop_after} updates, as asked")

    def check(self) -> None:
        """Raise what kept the writer from writing, if anything; on the rank that writes."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; all ranks together.

        Raises:
            RegressError: on every rank, if it could not be written.
        """
        raise_on_all_ranks(self._run.trainer.world, self._wait)

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        if self._written is not None:
            place, self._written = self._written, None
            self._wrote(*place)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            path = write_checkpoint(snapshot, self._home, self._config.save_total_limit)
            state = snapshot.state
            self._written = state.step, state.update - 1 if state.updates_in_step else None
            self._said(f"checkpoint written: {path}")
        except RegressError as error:
            self._failure = error
        except BaseException as error:  # nothing may be lost with the thread
            name = checkpoint_name(snapshot.state.step, snapshot.state.updates_in_step)
            self._failure = RegressError(
                f"{name} cannot be written to {self._home} ({reason(error)}); choose another trainer.checkpoint_dir"
            )
            self._failure.__cause__ = error
