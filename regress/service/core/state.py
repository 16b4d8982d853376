"""State of a running service: what outlasts it, in the journal, and the operations that are under way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, reason
from regress.service.api import Operation, ServiceError, Status
from regress.service.core.journal import Journal, Record, damaged, read_journal
from regress.service.core.lane import Lane
from regress.service.core.ledger import Ledger, ModelEntry, OperationEntry
from regress.service.core.limits import Limits
from regress.service.core.operations import Operations, Ticket
from regress.service.core.record_shapes import conform_record
from regress.service.core.records import packed_error, packed_result, unpacked_error, unpacked_result
from regress.service.core.saves import SaveStore

JOURNAL = "journal.jsonl"
_COMPACT = 64 << 20
"""Size of a journal in bytes that is worth writing anew."""


class State:
    """Everything that the service knows. Whoever uses it holds ``changed``, but for constants.

    Args:
        root: the state directory, which one service has at a time.
        limits: limits of the service.

    Attributes:
        lanes: queues by id of the model or sampler; the one whose turn is next comes first.
        waiting_bytes: size of the requests that wait.
        draining: True once nothing new is accepted.

    Raises:
        ConfigError: if the directory cannot be used, or another service uses it.
        ServiceError: if the journal is damaged.
    """

    def __init__(self, root: Path, limits: Limits) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.limits = limits
        self._lock = _locked(root)
        self.ledger = Ledger(limits.remembered)
        try:
            self._read(root / JOURNAL)
        except BaseException:
            os.close(self._lock)
            raise
        self.store = SaveStore(root / "saves")
        self.journal = Journal(root / JOURNAL)
        self.operations = Operations(limits)
        self.lanes: OrderedDict[str, Lane] = OrderedDict()
        self.waiting_bytes = 0
        self.draining = False

    def _read(self, path: Path) -> None:
        for number, record in enumerate(read_journal(path), 1):
            try:
                self.ledger.apply(conform_record(record))
            except (KeyError, ValueError) as error:  # a model that was never created, or another shape
                raise damaged(path, number) from error

    def close(self) -> None:
        """Release the state directory."""
        self.journal.close()
        os.close(self._lock)

    def note(self, *records: Record, sync: bool = False) -> None:
        """Take records in and make them last; raises `ServiceError` if they cannot be written."""
        self.journal.append(*records, sync=sync)
        for record in records:
            self.ledger.apply(record)
        if self.journal.size > _COMPACT:
            self.compact()

    def compact(self) -> None:
        """Write the journal anew, without what is no longer needed."""
        self.journal.replace(self.ledger.records())

    def accept(self, ticket: Ticket) -> None:
        """Make an operation known; raises `ServiceError` if that cannot be written."""
        mutates = ticket.job is not None and ticket.job.mutates
        names = ("id", "lane", "kind", "seq", "digest", "number")
        shown = {name: getattr(ticket, name) for name in names}
        self.note({"is": "accepted", **shown, "mutates": mutates})
        self.operations.add(ticket)

    def end(
        self, ticket: Ticket, result: Any, error: ServiceError | None, records: Sequence[Record] = ()
    ) -> None:
        """Make the end of an operation last, and tell it to those who wait; raises `ServiceError` if it cannot be."""
        ended: Record = {"is": "ended", "id": ticket.id, "ok": error is None}
        if error is not None:
            ended["error"] = packed_error(error)
        else:
            ended["result"] = packed_result(result)
        # the end comes first: what a save or a load makes last is all that came before
        self.note(ended, *records, sync=bool(records))
        self.operations.settle(ticket, result, error)

    def operation(self, id: str) -> Ticket | Operation:
        """Return an operation that is kept, or the state of one that is only remembered."""
        ticket = self.operations.get(id)
        if ticket is not None:
            return ticket
        entry = self.ledger.operations.get(id)
        if entry is None:
            raise ServiceError(f"there is no operation {id!r}; use the id of the reply", code="not_found")
        return self._remembered(entry)

    def lane(self, id: str) -> Lane:
        """Return the queue of a model or sampler, which may be new."""
        if id not in self.lanes:
            self.lanes[id] = Lane(id, self.limits.remembered)
        return self.lanes[id]

    def roll_back(self, model: ModelEntry, why: str, *, failed: bool) -> None:
        """Note that a model is restored; operations that it has lost keep it from going on.

        Args:
            why: what happened, as the end of a clause.
            failed: True if an operation that changes the model has failed by it.
        """
        interrupted = model.interrupted or self._interruption(model, why, failed)
        step = (model.point or model.info).step
        record = {"is": "restored", "id": model.id, "step": step, "interrupted": interrupted}
        self.ledger.apply(record)
        with contextlib.suppress(ServiceError):  # without this record a restart comes to the same
            self.journal.append(record)

    def tidy(self, model_id: str) -> None:
        """Remove saves without a name of which the model has newer ones, and folders that nothing needs any more."""
        saves = self.ledger.saves.items()
        unnamed = [path for path, save in saves if save.saved.model_id == model_id and not save.named]
        with contextlib.suppress(ServiceError):
            for path in unnamed[: -self.limits.unnamed]:
                self.note({"is": "save_removed", "path": path})
        self.store.clean(self.ledger.folders)

    def _interruption(self, model: ModelEntry, why: str, failed: bool) -> str | None:
        if model.unsaved or failed:
            lost = f"what {model.id} did since its last save was lost when {why}"
        elif model.point is not None and not model.point.optimizer:
            lost = f"the optimizer state of {model.id} was lost when {why}"
        else:
            return None
        return f"{lost}: {model.stands}; load a save, or create a model of one, to go on"

    def _remembered(self, entry: OperationEntry) -> Operation:
        model_id = entry.lane if entry.lane in self.ledger.models else None
        if entry.ok and entry.result is not None:
            return Operation(entry.id, Status.DONE, model_id, unpacked_result(entry.result))
        if entry.error is not None:
            return Operation(entry.id, Status.FAILED, model_id, error=unpacked_error(entry.error))
        if entry.ok and entry.kind.startswith("close"):
            return Operation(entry.id, Status.DONE, model_id)
        error = ServiceError(
            f"{entry.kind} {entry.id} was executed, and its result is no longer kept; read a result at once, or raise "
            "the time for which the service keeps it",
            code="result_expired",
        )
        return Operation(entry.id, Status.FAILED, model_id, error=error)


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(8)}"


def _locked(root: Path) -> int:
    """Return a handle that holds the state directory for this process."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be the state directory ({reason(error)}); choose another --state-dir"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ConfigError(
            f"another service uses the state directory {root}; end it, or choose another --state-dir"
        ) from None
    return handle
