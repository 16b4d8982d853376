"""Models and samplers that the host holds, restored where the service knows them and the host does not."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from regress.service.core.host_executor import Executor, HostCall, HostLostError, as_service_error
from regress.service.core.ledger_entries import ModelEntry, Point, SaveEntry
from regress.service.core.operations import PendingOperation
from regress.service.core.save_storage import SaveStore
from regress.service.core.service_limits import Limits
from regress.service.core.sqlite_ledger import Ledger
from regress.service.service_api import Json, ServiceError

log = logging.getLogger("regress.service")


class Hosted:
    """Calls the host on behalf of one operation after another.

    Args:
        executor: calls the methods of the host.
        ledger: models, saves and samplers that there are.
        store: folders of the saves.
        limits: time of a call, and number of open samplers.
    """

    def __init__(self, executor: Executor, ledger: Ledger, store: SaveStore, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self.ledger = ledger
        self.store = store
        self._models: set[str] = set()
        self._samplers: OrderedDict[str, None] = OrderedDict()

    def call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        """Return the result of a method of the host; raises `ServiceError`, or `OSError` of the disk."""
        try:
            call = HostCall(method, arguments, settings)
            return self._executor.call(call, self._limits.operation_timeout)
        except OSError:
            raise  # the disk's, which a save explains
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("%s failed", method)
            raise as_service_error(error, method) from error

    def where(self, pending: PendingOperation) -> Json:
        """Return what names a request in dumps."""
        return {
            "model_id": pending.model_id,
            "operation": pending.id,
            "request_id": pending.id,
            "seq_id": pending.seq,
        }

    def created(self, model_id: str) -> None:
        """Note that the host holds a model."""
        self._models.add(model_id)

    def model(self, model_id: str, *, goes_on: bool = True) -> ModelEntry:
        """Return a model that the host holds, after restoring it if need be.

        Args:
            goes_on: True for what continues its training, which an interrupted model refuses.

        Raises:
            ServiceError: there is no such model, it is interrupted, or it cannot be restored.
        """
        entry = self.ledger.models.get(model_id)
        if entry is None or entry.closed:
            raise ServiceError(
                f"there is no model {model_id}: it was not created, or is closed", code="not_found"
            )
        if goes_on and entry.interrupted is not None:
            raise ServiceError(entry.interrupted, code="interrupted", category="server")
        if model_id not in self._models:
            self._restore(entry)
        return entry

    def saved(self, path: str) -> SaveEntry:
        """Return a save whose files are whole; raises `ServiceError` if there is none."""
        entry = self.ledger.saves.get(path)
        if entry is None:
            raise ServiceError(
                f"there is no save {path!r}; use a path that a save has returned", code="not_found"
            )
        self.store.check(entry.folder)
        return entry

    def sampler(self, sampler_id: str) -> None:
        """Make the host hold a sampler, closing the one that was not used for longest if there are too many."""
        if sampler_id in self._samplers:
            self._samplers.move_to_end(sampler_id)
            return
        entry = self.ledger.samplers.get(sampler_id)
        if entry is None:
            raise ServiceError(
                f"there is no sampler {sampler_id}: it was not created, or is closed", code="not_found"
            )
        folder = None
        if entry.folder is not None:
            if not self.store.path(entry.folder).is_dir():
                raise ServiceError(
                    f"the save {entry.path} of {sampler_id} was replaced or removed; create a sampler of a newer one",
                    code="not_found",
                )
            self.store.check(entry.folder)
            folder = str(self.store.path(entry.folder))
        while len(self._samplers) >= self._limits.samplers:
            self.close_sampler(next(iter(self._samplers)))
        self.call("open_sampler", sampler_id, folder, entry.base_model)
        self._samplers[sampler_id] = None

    def close_sampler(self, sampler_id: str) -> None:
        """Make the host drop a sampler, if it holds it."""
        if sampler_id in self._samplers:
            del self._samplers[sampler_id]
            self.call("close_sampler", sampler_id)

    def close_model(self, model_id: str) -> None:
        """Make the host drop a model, if it holds it."""
        if model_id in self._models:
            self._models.discard(model_id)
            self.call("close", model_id)

    def drop(self, model_id: str) -> None:
        """Make the host drop a model that may be half changed; it is restored when it is used again."""
        try:
            self.close_model(model_id)
        except HostLostError:
            raise
        except (ServiceError, OSError) as error:
            raise HostLostError(str(error), code="internal", category="server") from error

    def restart(self) -> None:
        """Start the host again, without models."""
        self._models.clear()
        self._samplers.clear()
        self._executor.restart()

    def _restore(self, entry: ModelEntry) -> None:
        source = entry.point or entry.origin
        if isinstance(source, Point):
            self._create_from(entry.id, source.folder, source.optimizer)
        else:
            self.call("create", entry.id, source)
        self._models.add(entry.id)

    def _create_from(self, model_id: str, folder: str, optimizer: bool) -> None:
        self.store.check(folder)
        self.call("create_from", model_id, str(self.store.path(folder)), optimizer=optimizer)
