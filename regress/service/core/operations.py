"""Operations of a service: their states, and the results that are kept until they are read."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from regress.service.core.request_digest import size_of
from regress.service.core.service_limits import Limits
from regress.service.service_api import Operation, ServiceError, Status

if TYPE_CHECKING:
    from regress.service.core.ledger_entries import OperationEntry


class Work(Protocol):
    """Work of an operation, which `regress.service.core.operation_kinds` has for each kind."""

    @property
    def kind(self) -> str:
        """Name of the operation in errors, logs and dumps."""

    @property
    def mutates(self) -> bool:
        """True if it changes the weights, the optimizer or the gradients of a model."""


@dataclass(eq=False)
class PendingOperation:
    """An accepted request on its way.

    Attributes:
        id: id of the operation.
        queue: id of the model or sampler in whose queue it waits.
        seq: its sequence number, None for one in order of arrival.
        number: number that a client has given it, which orders nothing.
        digest: digest of its content.
        size: size of its content in bytes.
        job: what is to be done; dropped with the end of the operation.
        result_size: size of the result in bytes.
        entry: what the ledger holds of it, once it is accepted.
        accepted, started, finished, read: times of the events, s.
    """

    id: str
    queue: str
    kind: str
    seq: int | None
    digest: str
    size: int = 0
    model_id: str | None = None
    number: int | None = None
    job: Work | None = None
    status: Status = Status.PENDING
    result: Any = None
    error: ServiceError | None = None
    result_size: int = 0
    accepted: float = field(default_factory=time.monotonic)
    started: float | None = None
    finished: float | None = None
    read: float | None = None
    entry: OperationEntry | None = None
    final: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """Operation as errors name it."""
        number = "" if self.seq is None else f" of seq_id {self.seq}"
        return f"{self.kind}{number}"

    def shown(self) -> Operation:
        """Return the state at this moment."""
        return Operation(self.id, self.status, self.model_id, self.result, self.error)


class Operations:
    """Operations of a service by id, from their acceptance until their results are no longer kept. It has no lock.

    Attributes:
        results_bytes: size of all results that are kept.
        unread_bytes: size of those that nobody has read.
        unread: number of operations whose end nobody has read.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_id: OrderedDict[str, PendingOperation] = OrderedDict()
        self.results_bytes = 0
        self.unread_bytes = 0
        self.unread = 0

    def add(self, pending: PendingOperation) -> None:
        """Keep an operation."""
        self._by_id[pending.id] = pending

    def get(self, id: str) -> PendingOperation | None:
        """Return an operation, None if it is not kept."""
        return self._by_id.get(id)

    def finish(self, pending: PendingOperation, result: Any, error: ServiceError | None) -> None:
        """Bring an operation to its end, of which those that wait for it learn."""
        pending.status = Status.DONE if error is None else Status.FAILED
        pending.result, pending.error, pending.job = result, error, None
        pending.result_size = 0 if result is None else size_of(result)
        pending.finished = time.monotonic()
        self.results_bytes += pending.result_size
        self.unread_bytes += pending.result_size
        self.unread += 1
        pending.final.set()

    def read(self, pending: PendingOperation) -> None:
        """Note that somebody has got the end of an operation."""
        if pending.finished is not None and pending.read is None:
            pending.read = time.monotonic()
            self.unread_bytes -= pending.result_size
            self.unread -= 1

    def sweep(self, now: float) -> None:
        """Drop results whose time is over and, beyond the limit on their size, those that were read, oldest first."""
        for pending in list(self._by_id.values()):
            if pending.finished is None:
                continue
            late = now - pending.finished > self._limits.result_ttl
            if pending.read is not None:
                full = self.results_bytes > self._limits.results_bytes
                late = full or now - pending.read > self._limits.read_ttl
            if late:
                self._drop(pending)

    def _drop(self, pending: PendingOperation) -> None:
        del self._by_id[pending.id]
        self.results_bytes -= pending.result_size
        if pending.read is None:
            self.unread_bytes -= pending.result_size
            self.unread -= 1
