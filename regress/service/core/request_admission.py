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
        ticket = self._ticket(model_id, None, job, content_of(job.kind, job))
        known = self._state.ledger.creation(model_id)
        if known is not None:
            return self._known(ticket, known)
        if model_id in self._state.ledger.models:
            raise ServiceError(f"{model_id} was closed; create another model", code="conflict")
        self._require_room_for_model()
        self._queue(self._state.lane(model_id), ticket)
        return ticket.shown()

    def submit(
        self, lane_id: str, seq: int | None, job: Job, content: Content, number: int | None = None
    ) -> Operation:
        """Queue a request.

        Args:
            content: content of the job.
            number: number of the request that orders nothing.

        Raises:
            ServiceError: there is no such model or sampler, the queue is full, or the number cannot be.
        """
        lane = self._lane(lane_id)
        ticket = self._ticket(lane_id, seq, job, content)
        if seq is not None:
            known = self._state.ledger.in_sequence(lane_id, seq)
            if known is not None:
                return self._known(ticket, known)
        if number is not None:
            ticket.number = number
            earlier = self._state.ledger.numbered(lane_id, number)
            if earlier is not None:
                return self._known(ticket, earlier)
        self.require_open()
        if seq is not None:
            try:
                self._check(lane, seq)
            except ServiceError as error:
                return self._failed(ticket, error)
        self._require_room(lane, ticket)
        self._queue(lane, ticket)
        return ticket.shown()

    def fail(self, model_id: str, seq: int, error: ServiceError) -> Operation:
        """Spend a number on a request that could not be read."""
        lane = self._lane(model_id)
        content = content_of("unreadable", error.code, str(error))
        ticket = PendingOperation(
            new_id("op"), model_id, "request", seq, content.digest, content.size, model_id=model_id
        )
        known = self._state.ledger.in_sequence(model_id, seq)
        if known is not None:
            if known.digest == ticket.digest:
                return self._known(ticket, known)
            return self._failed(ticket, error)
        try:
            self._check(lane, seq)
        except ServiceError:
            return self._failed(ticket, error)
        self._state.accept(ticket)
        lane.spend(seq)
        self._state.end(ticket, None, error)
        self._state.changed.notify_all()
        return ticket.shown()

    def close(self, id: str, job: Job) -> None:
        """Queue the end of a model or sampler, behind which nothing is accepted."""
        lane = self._state.lane(id)
        if not lane.closing:
            lane.closing = True
            self._queue(lane, self._ticket(id, None, job, content_of(job.kind, job)))

    def withdraw(self, ticket: PendingOperation) -> None:
        """Fail an operation that waits, as its client asks."""
        self._state.lanes[ticket.lane].discard(ticket)
        self._state.waiting_bytes -= ticket.size
        error = ServiceError(f"{ticket.name} was cancelled before it was executed", code="cancelled")
        try:
            self._state.end(ticket, None, error)
        except ServiceError:  # not written: a restart fails it for another reason
            self._state.operations.settle(ticket, None, error)
        self._state.changed.notify_all()

    def _ticket(self, lane_id: str, seq: int | None, job: Job, content: Content) -> PendingOperation:
        sampler = lane_id in self._state.ledger.samplers
        return PendingOperation(
            new_id("op"),
            lane_id,
            job.kind,
            seq,
            content.digest,
            content.size,
            model_id=None if sampler else lane_id,
            job=job,
        )

    def _lane(self, id: str) -> OperationQueue:
        lane = self._state.lanes.get(id)
        if lane is None or lane.closing:
            raise ServiceError(f"there is no model or sampler {id!r}, or it is closed", code="not_found")
        return lane

    def _known(self, ticket: PendingOperation, known: OperationEntry) -> Operation:
        """Return the operation of an earlier request, which is the same unless its content differs."""
        if known.digest == ticket.digest:
            found = self._state.operation(known.id)
            return found if isinstance(found, Operation) else found.shown()
        used = ticket.number if ticket.seq is None else ticket.seq
        what = "another model" if used is None else "a request with other content"
        number = ticket.lane if used is None else f"seq_id {used} of {ticket.lane}"
        error = ServiceError(
            f"{number} was used for {what}, which it remains; give each request a number of its own",
            code="conflict",
        )
        return self._failed(ticket, error)

    def _check(self, lane: OperationQueue, seq: int) -> None:
        if isinstance(seq, bool) or seq < 1:
            raise ServiceError(
                f"seq_id {seq} is not a number of a request; count from 1", code="invalid_seq_id"
            )
        lane.check(seq, self._state.limits.queue_length)

    def _failed(self, ticket: PendingOperation, error: ServiceError) -> Operation:
        """Return an operation that has failed, and has spent no number."""
        ticket.seq = ticket.number = None
        self._state.accept(ticket)
        self._state.end(ticket, None, error)
        return ticket.shown()

    def _queue(self, lane: OperationQueue, ticket: PendingOperation) -> None:
        self._state.accept(ticket)
        lane.add(ticket)
        self._state.waiting_bytes += ticket.size
        self._state.changed.notify_all()

    def _require_room(self, lane: OperationQueue, ticket: PendingOperation) -> None:
        """Raise `ServiceError` if a queue is full, unless others wait for this very request."""
        state, limits = self._state, self._state.limits
        if lane.awaited(ticket.seq):
            return
        if len(lane) >= limits.queue_length:
            raise _busy(f"{len(lane)} operations of {lane.id} wait already")
        if state.waiting_bytes + ticket.size > limits.queue_bytes and state.waiting_bytes:
            raise _busy(f"requests of {state.waiting_bytes} bytes wait already")
        if state.operations.unread_bytes > limits.results_bytes:
            raise _busy(f"results of {state.operations.unread_bytes} bytes have not been read")

    def _require_room_for_model(self) -> None:
        ledger = self._state.ledger
        count = sum(id not in ledger.samplers for id in self._state.lanes)
        if count >= self._state.limits.models:
            raise _busy(f"{count} models are open; close one")


def _busy(why: str) -> ServiceError:
    return ServiceError(
        f"{why}; send the request again later", code="busy", category="server", retryable=True
    )
