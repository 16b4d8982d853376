"""Execution of operations: one at a time, the models and samplers in turn, each in its own order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

from regress.service.core.host_executor import HostFailedError, HostLostError
from regress.service.core.host_proxy import Hosted
from regress.service.core.operation_kinds import Close, CreateModel, Job, Outcome, Save
from regress.service.core.operation_queue import OperationQueue
from regress.service.core.operations import PendingOperation
from regress.service.core.service_state import State
from regress.service.service_api import ServiceError, Status

log = logging.getLogger("regress.service")

_TURN = 0.2
"""Seconds between two looks for what has waited too long."""

Failure = TypeVar("Failure", HostLostError, HostFailedError)
OnEnd = Callable[[PendingOperation], None]


class Worker:
    """Thread that runs the operations of a state's queues.

    Args:
        state: queues and operations; its condition is notified of new ones.
        hosted: models and samplers in the host.
        each_turn: called a few times a second, with the lock held.
        on_end: called with each operation that has ended.
    """

    def __init__(
        self, state: State, hosted: Hosted, each_turn: Callable[[float], None], on_end: OnEnd
    ) -> None:
        self._state, self._hosted = state, hosted
        self._each_turn, self._on_end = each_turn, on_end
        self._ending = False
        self.busy: PendingOperation | None = None
        self.problem: str | None = None
        self.executed = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="regress-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self, timeout: float) -> bool:
        """End the thread after the operation that it is in; returns False if that takes longer."""
        with self._state.changed:
            self._ending = True
            self._state.changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        last = 0.0
        while True:
            with self._state.changed:
                if self._ending:
                    return
                if time.monotonic() - last > _TURN:
                    last = time.monotonic()
                    self._turn(last)
                pending = self._next()
                if pending is None:
                    self._state.changed.wait(_TURN)
                    continue
                pending.started, pending.status = time.monotonic(), Status.RUNNING
                self.busy = pending
            try:
                self._execute(pending)
            except Exception:  # the next operation has to run
                log.exception("%s of %s", pending.name, pending.queue)

    def _turn(self, now: float) -> None:
        """Find what has waited too long; the lock is held."""
        self._each_turn(now)
        for queue in self._state.queues.values():
            waited = queue.hole(now)
            if waited > (0.0 if self._state.draining else self._state.limits.hole_timeout):
                self._give_up(queue, waited)

    def _give_up(self, queue: OperationQueue, waited: float) -> None:
        missing, waiting = queue.give_up()
        others = ", ".join(str(pending.seq) for pending in waiting if pending.seq is not None)
        why = "and the service is stopping" if self._state.draining else f"within {waited:.0f} s"
        for pending in waiting:
            error = ServiceError(
                f"""{pending.name} was not executed: seq_id {missing} of {queue.id} has not arrived {why}, for which
                seq_id {others or "none"} waited; send every number, or go on with a higher one""",
                code="missing_seq_id",
            )
            self._finish(pending, None, error)

    def _next(self) -> PendingOperation | None:
        """Return an operation of the queue whose turn it is."""
        queues = self._state.queues
        for id in list(queues):
            pending = queues[id].take()
            if pending is not None:
                queues.move_to_end(id)
                self._state.waiting_bytes -= pending.size
                return pending
        return None

    def _execute(self, pending: PendingOperation) -> None:
        job = cast(Job, pending.job)
        outcome, error = self._outcome(pending, job)
        try:
            if isinstance(error, HostLostError):
                error = self._lose(pending, job, error)
            elif isinstance(error, HostFailedError) and job.mutates:
                error = self._repair(pending, job, error)
        finally:
            with self._state.changed:
                self.executed += 1
                self.seconds += time.monotonic() - (pending.started or 0.0)
                self.busy = None
                self._finish(pending, outcome, error)
                if error is None and isinstance(job, Close):
                    self._close(pending.queue, "was closed")
                elif error is not None and isinstance(job, CreateModel):
                    self._close(pending.queue, "could not be created")
                elif error is None and isinstance(job, Save):
                    self._state.tidy(pending.queue)
        if isinstance(error, HostLostError) or self.problem is not None:
            self._restart()

    def _outcome(self, pending: PendingOperation, job: Job) -> tuple[Outcome | None, ServiceError | None]:
        try:
            return job.run(self._hosted, pending), None
        except ServiceError as error:
            return None, error
        except Exception as error:  # a defect of the service fails one operation
            log.exception("%s of %s failed", pending.name, pending.queue)
            failed = HostFailedError(
                f"{pending.name} failed in the service; its log has the traceback under {pending.id}",
                code="internal",
                category="server",
            )
            failed.__cause__ = error
            return None, failed

    def _finish(self, pending: PendingOperation, outcome: Outcome | None, error: ServiceError | None) -> None:
        """Make the end of an operation last, and tell it; the lock is held."""
        result = None if outcome is None else outcome.result
        try:
            self._state.end(pending, result, error, () if outcome is None else outcome.entries)
        except ServiceError as unwritten:
            if outcome is not None and outcome.entries:
                with contextlib.suppress(ServiceError, OSError):
                    outcome.undo()
                error = error or unwritten
            self._state.operations.finish(pending, None if error else result, error)
        if pending.kind.startswith("close"):
            self._state.operations.read(pending)  # no client has its id
        with contextlib.suppress(Exception):  # a log that cannot be written stops nothing
            self._on_end(pending)
        self._state.changed.notify_all()

    def _lose(self, pending: PendingOperation, job: Job, error: HostLostError) -> HostLostError:
        """Note that all models are gone; returns the error of the operation that did it."""
        with self._state.changed:
            why = f"{pending.name} of {pending.queue} ended the ranks"
            for model in list(self._state.ledger.models.values()):
                if not model.closed:
                    self._state.roll_back(model, why, failed=model.id == pending.queue and job.mutates)
        return self._standing(pending, error)

    def _repair(self, pending: PendingOperation, job: Job, error: HostFailedError) -> ServiceError:
        """Have a model that may be half changed restored; returns the error of the operation that did it."""
        try:
            self._hosted.drop(pending.queue)
        except HostLostError as lost:
            log.error("%s", lost)
            return self._lose(
                pending, job, HostLostError(str(error), code=error.code, category=error.category)
            )
        with self._state.changed:
            model = self._state.ledger.models.get(pending.queue)
            if model is not None:
                self._state.roll_back(model, f"{pending.name} failed", failed=False)
        return self._standing(pending, error)

    def _standing(self, pending: PendingOperation, error: Failure) -> Failure:
        """Return an error that also says at which step the model stands now."""
        model = self._state.ledger.models.get(pending.queue)
        if model is None:
            return error
        return type(error)(f"{error}; {model.stands}", code=error.code, category=error.category)

    def _restart(self) -> None:
        """Start the ranks again; until that succeeds, operations fail and it is tried again."""
        self.problem = "the ranks are being started again"
        try:
            self._hosted.restart()
            self.problem = None
        except Exception as error:
            log.exception("the ranks cannot be started again")
            self.problem = f"the ranks cannot be started again: {error}"

    def _close(self, id: str, why: str) -> None:
        queue = self._state.queues.pop(id, None)
        for pending in [] if queue is None else queue.waiting:
            self._state.waiting_bytes -= pending.size
            error = ServiceError(f"{pending.name} was not executed: {id} {why}", code="closed")
            self._finish(pending, None, error)
