"""State of a running service: what outlasts it, in the ledger, and the operations that are under way."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, reason
from regress.service.core.ledger_entries import (
    Change,
    Entry,
    Failure,
    Lost,
    ModelEntry,
    OperationEntry,
    Removed,
)
from regress.service.core.operation_queue import OperationQueue
from regress.service.core.operations import Operations, PendingOperation
from regress.service.core.save_storage import SaveStore
from regress.service.core.service_limits import Limits
from regress.service.core.sqlite_ledger import FILE, Ledger
from regress.service.service_api import ModelInfo, Operation, OptimResult, Saved, ServiceError, Status

_EARLIER = "journal.jsonl"
_STOPPED = "the service stopped"


class State:
    """Everything that the service knows. Whoever uses it holds ``changed``, but for constants.

    Args:
        root: the state directory, which one service has at a time.
        limits: limits of the service.

    Attributes:
        queues: those of operations, by id of the model or sampler; the one whose turn is next comes first.
        waiting_bytes: size of the requests that wait.
        draining: True once nothing new is accepted.

    Raises:
        ConfigError: if the directory cannot be used, or another service uses it.
        ServiceError: if the ledger is damaged.
    """

    def __init__(self, root: Path, limits: Limits) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.limits = limits
        if (root / _EARLIER).exists() and not (root / FILE).exists():  # its saves would be removed
            raise ConfigError(
                f"{root} is the state of an earlier release, which this one does not read; choose an empty --state-dir"
            )
        try:
            self.store = SaveStore(root / "saves")
        except OSError as error:
            raise ConfigError(
                f"{root} cannot be the state directory ({reason(error)}); choose another --state-dir"
            ) from error
        self.ledger = Ledger(root / FILE, limits.remembered)
        self.operations = Operations(limits)
        self.queues: OrderedDict[str, OperationQueue] = OrderedDict()
        self.waiting_bytes = 0
        self.draining = False

    def close(self) -> None:
        """Release the state directory."""
        self.ledger.close()

    def accept(self, pending: PendingOperation) -> None:
        """Make an operation known; raises `ServiceError` if that cannot be written."""
        mutates = pending.job is not None and pending.job.mutates
        names = ("id", "queue", "kind", "seq", "digest", "number")
        shown = {name: getattr(pending, name) for name in names}
        pending.entry = OperationEntry(**shown, mutates=mutates)
        self.ledger.write(pending.entry)
        self.operations.add(pending)

    def end(
        self,
        pending: PendingOperation,
        result: Any,
        error: ServiceError | None,
        entries: Sequence[Entry | Removed] = (),
    ) -> None:
        """Make the end of an operation last, and tell it to those who wait; raises `ServiceError` if it cannot be.

        Args:
            entries: what the operation has made, which outlasts the end of the machine, too.
        """
        assert pending.entry is not None
        ended = self._ended(pending.entry, result, error)
        changes = [
            # what a save or a load makes last is all that came before, itself included
            replace(entry, since=ended.ended or 0) if isinstance(entry, ModelEntry) else entry
            for entry in entries
        ]
        model = self.ledger.models.get(pending.queue)
        if model is not None and ended.ok and ended.mutates and not entries:
            step = result.step if isinstance(result, OptimResult) else model.step
            if not model.changed or step != model.step:
                changes = [replace(model, changed=True, step=step)]
        self.ledger.write(ended, *changes, sync=bool(entries))
        self.operations.finish(pending, result, error)

    def operation(self, id: str) -> PendingOperation | Operation:
        """Return an operation that is kept, or the state of one that is only remembered."""
        pending = self.operations.get(id)
        if pending is not None:
            return pending
        entry = self.ledger.operation(id)
        if entry is None:
            raise ServiceError(f"there is no operation {id!r}; use the id of the reply", code="not_found")
        return self._remembered(entry)

    def queue(self, id: str) -> OperationQueue:
        """Return the queue of a model or sampler, which may be new."""
        if id not in self.queues:
            self.queues[id] = OperationQueue(id)
        return self.queues[id]

    def roll_back(self, model: ModelEntry, why: str, *, failed: bool) -> None:
        """Note that a model is restored; operations that it has lost keep it from going on.

        Args:
            why: what happened, as the end of a clause.
            failed: True if an operation that changes the model has failed by it.
        """
        restored = self._rolled_back(model, why, failed=failed)
        with contextlib.suppress(ServiceError):  # without this a restart comes to the same
            self.ledger.write(restored)
        self.ledger.models[model.id] = restored

    def tidy(self, model_id: str) -> None:
        """Remove saves without a name of which the model has newer ones, and folders that nothing needs any more."""
        saves = self.ledger.saves.values()
        unnamed = [save for save in saves if save.saved.model_id == model_id and not save.named]
        with contextlib.suppress(ServiceError):
            self.ledger.write(*(Removed(save) for save in unnamed[: -self.limits.unnamed]))
        self.store.clean(self.ledger.folders)

    def recover(self) -> None:
        """Fail every operation that was under way or whose effect is in no save, and queue what comes next.

        Models go on from their last save. Nothing is executed again.
        """
        changes: list[Change] = []
        under_way = {entry.id: entry for entry in self.ledger.under_way()}
        for model in self.ledger.models.values():
            if model.closed:
                continue
            own = [under_way.pop(entry.id) for entry in [*under_way.values()] if entry.queue == model.id]
            failed = any(entry.mutates for entry in own)
            changes.append(self._rolled_back(model, _STOPPED, failed=failed))
            changes += [self._broken_off(entry, model.stands) for entry in own]
            if model.changed:
                lost = f"the effect of {{operation}} was lost when {_STOPPED}; {model.stands}"
                changes.append(Lost(model, Failure.of(_restarted(lost))))
            self.queue(model.id).go_on(*self.ledger.spent(model.id))
        changes += [self._broken_off(entry, "send it again") for entry in under_way.values()]
        self.ledger.write(*changes)
        for sampler in self.ledger.samplers:
            self.queue(sampler)
        self.store.clean(self.ledger.folders)

    def _broken_off(self, entry: OperationEntry, remedy: str) -> OperationEntry:
        sentence = f"{entry.name} was not executed to its end when {_STOPPED}; {remedy}"
        return self._ended(entry, None, _restarted(sentence))

    def _ended(self, entry: OperationEntry, result: Any, error: ServiceError | None) -> OperationEntry:
        return replace(
            entry,
            ended=entry.ended or self.ledger.ended + 1,
            ok=error is None,
            error=None if error is None else Failure.of(error),
            result=result if isinstance(result, ModelInfo | OptimResult | Saved) and error is None else None,
        )

    def _rolled_back(self, model: ModelEntry, why: str, *, failed: bool) -> ModelEntry:
        interrupted = model.interrupted or self._interruption(model, why, failed)
        step = (model.point or model.info).step
        return replace(model, step=step, interrupted=interrupted, changed=False, since=self.ledger.ended)

    def _interruption(self, model: ModelEntry, why: str, failed: bool) -> str | None:
        if model.changed or failed:
            lost = f"what {model.id} did since its last save was lost when {why}"
        elif model.point is not None and not model.point.optimizer:
            lost = f"the optimizer state of {model.id} was lost when {why}"
        else:
            return None
        return f"{lost}: {model.stands}; load a save, or create a model of one, to go on"

    def _remembered(self, entry: OperationEntry) -> Operation:
        model_id = entry.queue if entry.queue in self.ledger.models else None
        if entry.ok and entry.result is not None:
            return Operation(entry.id, Status.DONE, model_id, entry.result)
        if entry.error is not None:
            return Operation(entry.id, Status.FAILED, model_id, error=entry.error.error)
        if entry.ok and entry.kind.startswith("close"):
            return Operation(entry.id, Status.DONE, model_id)
        error = ServiceError(
            f"""{entry.kind} {entry.id} was executed, and its result is no longer kept; read a result at once, or raise
            the time for which the service keeps it""",
            code="result_expired",
        )
        return Operation(entry.id, Status.FAILED, model_id, error=error)


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(8)}"


def _restarted(sentence: str) -> ServiceError:
    return ServiceError(sentence, code="restarted", category="server")
