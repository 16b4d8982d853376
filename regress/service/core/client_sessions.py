"""Sessions of clients, and the models and samplers that belong to them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from regress.service.core.ledger_entries import SamplerEntry, SessionEntry
from regress.service.core.request_digest import content_of
from regress.service.core.service_state import State, new_id
from regress.service.service_api import Json, ModelInfo, SamplerInfo, ServiceError


class Sessions:
    """Sessions of a state, whose lock callers hold.

    Attributes:
        open: time of the last sign of life of each open session, s.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        ledger = state.ledger
        now = time.monotonic()
        self.open = {entry.id: now for entry in ledger.sessions.values() if not entry.finished}

    def create(self, metadata: Json, key: str | None = None) -> str:
        """Return the id of a new session, or of the open one of a key; raises `ServiceError` if there are too many."""
        digest = None if key is None else content_of(key).digest
        sessions = self._state.ledger.sessions
        known = (id for id in self.open if digest is not None and sessions[id].key == digest)
        if (found := next(known, None)) is not None:
            return found
        if len(self.open) >= self._state.limits.sessions:
            raise ServiceError(
                f"{len(self.open)} sessions are open; finish one, or try again later",
                code="busy",
                category="server",
                retryable=True,
            )
        id = new_id("session")
        self._state.ledger.write(SessionEntry(id, dict(metadata), digest))
        self.open[id] = time.monotonic()
        return id

    def metadata(self, id: str) -> Mapping[str, object]:
        """Return what a session was created with."""
        try:
            return self._state.ledger.sessions[id].metadata
        except KeyError:
            raise _unknown("session", id) from None

    def require(self, id: str) -> None:
        """Raise `ServiceError` unless a session is open; it has given a sign of life."""
        self.metadata(id)
        if id not in self.open:
            raise ServiceError(f"session {id} is finished; create another one", code="not_found")
        self.open[id] = time.monotonic()

    def touch(self, id: str) -> None:
        """Note a sign of life of a session."""
        self.require(id)

    def alive(self, id: str) -> None:
        """Note a sign of life of the session that a model or sampler belongs to, if it is open."""
        session = id.partition(":")[0]
        if session in self.open:
            self.open[session] = time.monotonic()

    def finish(self, id: str) -> bool:
        """Finish a session; returns False if it is finished already."""
        self.metadata(id)
        if id not in self.open:
            return False
        del self.open[id]
        ledger = self._state.ledger
        ledger.write(*ledger.forgettable(), replace(ledger.sessions[id], finished=True))
        return True

    def expired(self) -> list[str]:
        """Return the open sessions that have given no sign of life for too long."""
        limit = time.monotonic() - self._state.limits.session_ttl
        return [id for id, last in self.open.items() if last < limit]

    def known_model(self, id: str) -> None:
        """Raise `ServiceError` unless there is or was such a model."""
        if id not in self._state.ledger.models and id not in self._state.queues:
            raise _unknown("model", id)

    def model_info(self, id: str) -> ModelInfo:
        """Return facts about a model that was created."""
        self.known_model(id)
        entry = self._state.ledger.models.get(id)
        if entry is None:
            raise ServiceError(
                f"model {id} is not created yet; wait for the operation that creates it",
                code="not_found",
                retryable=True,
            )
        return replace(entry.info, step=entry.step)

    def create_sampler(self, session: str, number: int, path: str | None, base_model: str | None) -> str:
        """Return the id of a sampler, which is a new one or exactly the same."""
        self.require(session)
        id = f"{session}:sample:{number}"
        known = self._state.ledger.samplers.get(id)
        if known is not None:
            if (known.path, known.base_model) != (path, base_model):
                raise ServiceError(
                    f"sampler {id} exists with other weights; give another number", code="conflict"
                )
            return id
        folder = None
        if path is not None:
            save = self._state.ledger.saves.get(path)
            if save is None:
                raise ServiceError(
                    f"there is no save {path!r}; use a path that a save has returned", code="not_found"
                )
            folder = save.folder
        self._state.ledger.write(SamplerEntry(id, session, path, base_model, folder))
        self._state.queue(id)
        return id

    def sampler_info(self, id: str, offered: Mapping[str, str]) -> SamplerInfo:
        """Return facts about a sampler; ``offered`` has the tokenizers of the base models by name."""
        known = self._state.ledger.samplers.get(id)
        if known is None:
            raise _unknown("sampler", id)
        base_model = known.base_model
        if known.path is not None:
            base_model = self._state.ledger.models[known.path.rsplit("/", 2)[0]].info.base_model
        assert base_model is not None
        return SamplerInfo(id, base_model, known.path, offered.get(base_model, ""))


def _unknown(what: str, id: str) -> ServiceError:
    return ServiceError(
        f"there is no {what} {id!r}; use the id of the reply that created it", code="not_found"
    )
