"""Admission of requests: known ones, numbers that cannot be, full queues; whatever passes is an operation."""

from __future__ import annotations

from regress.service.core.ledger_entries import OperationEntry
from regress.service.core.operation_kinds import CreateModel, Job
from regress.service.core.operation_queue import OperationQueue
from regress.service.core.operations import PendingOperation
from regress.service.core.request_digest import Content, content_of
from regress.service.core.service_state import State, new_id
from regress.service.service_api import Operation, ServiceError


class Admission:
    """Makes operations of requests; callers hold the lock of the state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def require_open(self) -> None:
        """Raise `ServiceError` if the service accepts nothing any more."""
        if self._state.draining:
            raise ServiceError(
                "the service is stopping; send the request again when it is back",
                code="draining",
                category="server",
                retryable=True,
            )

    def create(self, model_id: str, job: CreateModel) -> Operation:
        """Queue the creation of a model, which comes before all of its operations."""
        pending = self._pending(model_id, None, job, content_of(job.kind, job))
        known = self._state.ledger.creation(model_id)
        if known is not None:
            return self._known(pending, known)
        if model_id in self._state.ledger.models:
            raise ServiceError(f"{model_id} was closed; create another model", code="conflict")
        self._require_room_for_model()
        self._queue(self._state.queue(model_id), pending)
        return pending.shown()

    def submit(
        self, queue_id: str, seq: int | None, job: Job, content: Content, number: int | None = None
    ) -> Operation:
        """Queue a request.

        Args:
            content: content of the job.
            number: number of the request that orders nothing.

        Raises:
            ServiceError: there is no such model or sampler, the queue is full, or the number cannot be.
        """
        queue = self._open_queue(queue_id)
        pending = self._pending(queue_id, seq, job, content)
        if seq is not None:
            known = self._state.ledger.in_sequence(queue_id, seq)
            if known is not None:
                return self._known(pending, known)
        if number is not None:
            pending.number = number
            earlier = self._state.ledger.numbered(queue_id, number)
            if earlier is not None:
                return self._known(pending, earlier)
        self.require_open()
        if seq is not None:
            try:
                self._check(queue, seq)
            except ServiceError as error:
                return self._failed(pending, error)
        self._require_room(queue, pending)
        self._queue(queue, pending)
        return pending.shown()

    def fail(self, model_id: str, seq: int, error: ServiceError) -> Operation:
        """Spend a number on a request that could not be read."""
        queue = self._open_queue(model_id)
        content = content_of("unreadable", error.code, str(error))
        pending = PendingOperation(
            new_id("op"), model_id, "request", seq, content.digest, content.size, model_id=model_id
        )
        known = self._state.ledger.in_sequence(model_id, seq)
        if known is not None:
            if known.digest == pending.digest:
                return self._known(pending, known)
            return self._failed(pending, error)
        try:
            self._check(queue, seq)
        except ServiceError:
            return self._failed(pending, error)
        self._state.accept(pending)
        queue.spend(seq)
        self._state.end(pending, None, error)
        self._state.changed.notify_all()
        return pending.shown()

    def close(self, id: str, job: Job) -> None:
        """Queue the end of a model or sampler, behind which nothing is accepted."""
        queue = self._state.queue(id)
        if not queue.closing:
            queue.closing = True
            self._queue(queue, self._pending(id, None, job, content_of(job.kind, job)))

    def withdraw(self, pending: PendingOperation) -> None:
        """Fail an operation that waits, as its client asks."""
        self._state.queues[pending.queue].discard(pending)
        self._state.waiting_bytes -= pending.size
        error = ServiceError(f"{pending.name} was cancelled before it was executed", code="cancelled")
        try:
            self._state.end(pending, None, error)
        except ServiceError:  # not written: a restart fails it for another reason
            self._state.operations.finish(pending, None, error)
        self._state.changed.notify_all()

    def _pending(self, queue_id: str, seq: int | None, job: Job, content: Content) -> PendingOperation:
        sampler = queue_id in self._state.ledger.samplers
        return PendingOperation(
            new_id("op"),
            queue_id,
            job.kind,
            seq,
            content.digest,
            content.size,
            model_id=None if sampler else queue_id,
            job=job,
        )

    def _open_queue(self, id: str) -> OperationQueue:
        queue = self._state.queues.get(id)
        if queue is None or queue.closing:
            raise ServiceError(f"there is no model or sampler {id!r}, or it is closed", code="not_found")
        return queue

    def _known(self, pending: PendingOperation, known: OperationEntry) -> Operation:
        """Return the operation of an earlier request, which is the same unless its content differs."""
        if known.digest == pending.digest:
            found = self._state.operation(known.id)
            return found if isinstance(found, Operation) else found.shown()
        used = pending.number if pending.seq is None else pending.seq
        what = "another model" if used is None else "a request with other content"
        number = pending.queue if used is None else f"seq_id {used} of {pending.queue}"
        error = ServiceError(
            f"{number} was used for {what}, which it remains; give each request a number of its own",
            code="conflict",
        )
        return self._failed(pending, error)

    def _check(self, queue: OperationQueue, seq: int) -> None:
        if isinstance(seq, bool) or seq < 1:
            raise ServiceError(
                f"seq_id {seq} is not a number of a request; count from 1", code="invalid_seq_id"
            )
        queue.check(seq, self._state.limits.queue_length)

    def _failed(self, pending: PendingOperation, error: ServiceError) -> Operation:
        """Return an operation that has failed, and has spent no number."""
        pending.seq = pending.number = None
        self._state.accept(pending)
        self._state.end(pending, None, error)
        return pending.shown()

    def _queue(self, queue: OperationQueue, pending: PendingOperation) -> None:
        self._state.accept(pending)
        queue.add(pending)
        self._state.waiting_bytes += pending.size
        self._state.changed.notify_all()

    def _require_room(self, queue: OperationQueue, pending: PendingOperation) -> None:
        """Raise `ServiceError` if a queue is full, unless others wait for this very request."""
        state, limits = self._state, self._state.limits
        if queue.awaited(pending.seq):
            return
        if len(queue) >= limits.queue_length:
            raise _busy(f"{len(queue)} operations of {queue.id} wait already")
        if state.waiting_bytes + pending.size > limits.queue_bytes and state.waiting_bytes:
            raise _busy(f"requests of {state.waiting_bytes} bytes wait already")
        if state.operations.unread_bytes > limits.results_bytes:
            raise _busy(f"results of {state.operations.unread_bytes} bytes have not been read")

    def _require_room_for_model(self) -> None:
        ledger = self._state.ledger
        count = sum(id not in ledger.samplers for id in self._state.queues)
        if count >= self._state.limits.models:
            raise _busy(f"{count} models are open; close one")


def _busy(why: str) -> ServiceError:
    return ServiceError(
        f"{why}; send the request again later", code="busy", category="server", retryable=True
    )
