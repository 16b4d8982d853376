"""The training service: what the wires call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from regress.service.core.client_sessions import Sessions
from regress.service.core.host_executor import Executor, HostCall
from regress.service.core.host_proxy import Hosted
from regress.service.core.operation_kinds import Close, CreateModel, Job, Load, ModelCall, SamplerCall, Save
from regress.service.core.operation_worker import Worker
from regress.service.core.operations import PendingOperation
from regress.service.core.request_admission import Admission
from regress.service.core.request_digest import content_of
from regress.service.core.save_storage import checked_name
from regress.service.core.service_limits import Limits
from regress.service.core.service_state import State
from regress.service.service_api import (
    AdamParams,
    Array,
    Json,
    ModelInfo,
    ModelSpec,
    OfferedModel,
    Operation,
    PassRequest,
    SamplerInfo,
    SamplingRequest,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)

_SWEEP = 0.5
"""Seconds between two looks for what is no longer needed."""

OnEnd = Callable[[PendingOperation], None]


class CoreService:
    """A `regress.service.service_api.Service` on a host.

    Args:
        executor: runs the host's methods; it is started and closed here.
        root: the state directory: ledger and saves, from which a later service goes on.
        limits: lengths of queues, sizes and times.
        on_end: called with each operation that has ended, in the worker's thread.

    Raises:
        ConfigError: if the directory cannot be used.
        ServiceError: if the ledger is damaged, or the ranks cannot be started.
    """

    def __init__(
        self,
        executor: Executor,
        root: Path,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        on_end: OnEnd = lambda pending: None,
    ) -> None:
        self._executor, self._limits = executor, limits
        self._state = State(root, limits)
        self._swept = 0.0
        self._begin = time.monotonic()
        self._ended = {Status.DONE: 0, Status.FAILED: 0}
        self._on_end = on_end
        try:
            self._state.recover()
            executor.start()
            found = executor.call(HostCall("offered"), limits.operation_timeout)
            self._offered: Sequence[OfferedModel] = tuple(found)
        except BaseException:
            self._state.close()
            raise
        self._sessions = Sessions(self._state)
        self._admission = Admission(self._state)
        hosted = Hosted(executor, self._state.ledger, self._state.store, limits)
        self._worker = Worker(self._state, hosted, self._sweep, self._count)
        self._worker.start()

    def models_offered(self) -> Sequence[OfferedModel]:
        """Return the base models that clients may create."""
        return self._offered

    def create_session(self, metadata: Json, key: str | None = None) -> str:
        """Return the id of a new session, or of the one that a key has brought before."""
        with self._state.changed:
            self._admission.require_open()
            return self._sessions.create(metadata, key)

    def session_metadata(self, session_id: str) -> Json:
        """Return what a session was created with; it may be finished."""
        with self._state.changed:
            return self._sessions.metadata(session_id)

    def touch_session(self, session_id: str) -> None:
        """Note that a session's client is alive."""
        with self._state.changed:
            self._sessions.touch(session_id)

    def finish_session(self, session_id: str) -> None:
        """Close the models and samplers of a session behind what is queued."""
        with self._state.changed:
            if self._sessions.finish(session_id):
                self._close_all(session_id)

    def create_model(self, session_id: str, number: int, spec: ModelSpec) -> Operation:
        """Create a model; see `Service`."""
        if spec.base_model not in [model.name for model in self._offered]:
            names = ", ".join(model.name for model in self._offered)
            raise ServiceError(f"{spec.base_model!r} is not offered; choose one of {names}", code="not_found")
        return self._create(session_id, number, CreateModel(session_id, spec))

    def create_model_from(self, session_id: str, number: int, path: str, *, optimizer: bool) -> Operation:
        """Create a model of a save; see `Service`."""
        return self._create(session_id, number, CreateModel(session_id, path=path, optimizer=optimizer))

    def model_info(self, model_id: str) -> ModelInfo:
        """Return facts about a model and the step at which it stands."""
        with self._state.changed:
            return self._sessions.model_info(model_id)

    def close_model(self, model_id: str) -> None:
        """Close a model behind what is queued."""
        with self._state.changed:
            if model_id in self._state.queues:
                self._admission.close(model_id, Close("close_model"))

    def run_pass(self, model_id: str, seq_id: int | None, request: PassRequest) -> Operation:
        """Queue a pass; see `Service`."""
        return self._submit(model_id, seq_id, ModelCall("run_pass", request))

    def optim_step(self, model_id: str, seq_id: int | None, params: AdamParams) -> Operation:
        """Queue an optimizer step; see `Service`."""
        return self._submit(model_id, seq_id, ModelCall("optim_step", params))

    def save(
        self, model_id: str, seq_id: int | None, name: str | None, kind: SaveKind, *, overwrite: bool = False
    ) -> Operation:
        """Queue a save; see `Service`."""
        if name is not None:
            checked_name(name)
        return self._submit(model_id, seq_id, Save(name, kind, overwrite))

    def load(self, model_id: str, seq_id: int | None, path: str, *, optimizer: bool) -> Operation:
        """Queue a load; see `Service`."""
        return self._submit(model_id, seq_id, Load(path, optimizer))

    def saves(self, model_id: str) -> Sequence[Saved]:
        """Return the saves of a model, the oldest first; it may be closed."""
        with self._state.changed:
            self._sessions.known_model(model_id)
            entries = self._state.ledger.saves.values()
            return [entry.saved for entry in entries if entry.saved.model_id == model_id]

    def fail(self, model_id: str, seq_id: int, error: ServiceError) -> Operation:
        """Spend a number on a request that could not be read; see `Service`."""
        with self._state.changed:
            return self._admission.fail(model_id, seq_id, error)

    def create_sampler(
        self, session_id: str, number: int, *, path: str | None, base_model: str | None
    ) -> str:
        """Return the id of a sampler; its weights are opened when it is first used."""
        if path is None and base_model not in [model.name for model in self._offered]:
            raise ServiceError(
                f"{base_model!r} is not offered, and no path of a save is given; give one of both",
                code="not_found",
            )
        with self._state.changed:
            self._admission.require_open()
            return self._sessions.create_sampler(session_id, number, path, base_model)

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Return facts about a sampler."""
        offered = {model.name: model.tokenizer for model in self._offered}
        with self._state.changed:
            return self._sessions.sampler_info(sampler_id, offered)

    def sample(self, sampler_id: str, request: SamplingRequest, number: int | None = None) -> Operation:
        """Queue a sampling request; see `Service`."""
        return self._submit(sampler_id, None, SamplerCall("sample", [request]), number)

    def prompt_logprobs(self, sampler_id: str, *prompts: Array) -> Operation:
        """Queue a request for the log-probs of prompts."""
        return self._submit(sampler_id, None, SamplerCall("prompt_logprobs", prompts))

    def operation(self, operation_id: str, *, timeout: float = 0.0) -> Operation:
        """Return the state of an operation; see `Service`."""
        with self._state.changed:
            found = self._state.operation(operation_id)
        if isinstance(found, Operation):
            return found
        if timeout > 0:
            found.final.wait(timeout)
        with self._state.changed:
            self._state.operations.read(found)
            return found.shown()

    def cancel(self, operation_id: str) -> Operation:
        """Cancel an operation that does not run yet; any other is returned as it is."""
        with self._state.changed:
            found = self._state.operation(operation_id)
            if isinstance(found, Operation):
                return found
            if found.status is Status.PENDING:
                self._admission.withdraw(found)
            return found.shown()

    def health(self) -> Json:
        """Return ``status`` (``ok``, ``draining`` or ``failing``), and what runs."""
        with self._state.changed:
            busy, problem = self._worker.busy, self._worker.problem
            status = "draining" if self._state.draining else "failing" if problem else "ok"
            return {
                "status": status,
                "problem": problem,
                "ranks": self._executor.world_size,
                "running": None if busy is None else busy.id,
                "waiting": sum(len(queue) for queue in self._state.queues.values()),
            }

    def metrics(self) -> Mapping[str, float]:
        """Return counts, sizes and times by name."""
        with self._state.changed:
            state = self._state
            ledger = state.ledger
            return {
                "uptime_seconds": time.monotonic() - self._begin,
                "sessions": float(len(self._sessions.open)),
                "models": float(sum(not model.closed for model in ledger.models.values())),
                "samplers": float(len(ledger.samplers)),
                "saves": float(len(ledger.saves)),
                "operations_waiting": float(sum(len(queue) for queue in state.queues.values())),
                "operations_running": float(self._worker.busy is not None),
                "operations_done_total": float(self._ended[Status.DONE]),
                "operations_failed_total": float(self._ended[Status.FAILED]),
                "operation_seconds_total": self._worker.seconds,
                "unread_operations": float(state.operations.unread),
                "waiting_bytes": float(state.waiting_bytes),
                "results_bytes": float(state.operations.results_bytes),
                "unread_results_bytes": float(state.operations.unread_bytes),
                "journal_bytes": float(ledger.size),
                "ranks": float(self._executor.world_size),
            }

    def drain(self, timeout: float) -> bool:
        """Accept nothing new, and run what is queued; returns False if that takes longer than ``timeout`` s."""
        end = time.monotonic() + timeout
        with self._state.changed:
            self._state.draining = True
            self._state.changed.notify_all()
            while self._worker.busy is not None or any(self._state.queues.values()):
                rest = end - time.monotonic()
                if rest <= 0:
                    return False
                self._state.changed.wait(min(rest, 0.2))
        return True

    def close(self, timeout: float = 10.0) -> None:
        """End worker and ranks; operations that wait have failed for a service that goes on from this one's state."""
        if self._worker.end(timeout):
            self._executor.close()
        self._state.close()

    def _submit(self, queue_id: str, seq_id: int | None, job: Job, number: int | None = None) -> Operation:
        content = content_of(job.kind, job)  # takes long for large requests, and holds nobody up here
        with self._state.changed:
            self._sessions.alive(queue_id)
            return self._admission.submit(queue_id, seq_id, job, content, number)

    def _create(self, session_id: str, number: int, job: CreateModel) -> Operation:
        with self._state.changed:
            self._admission.require_open()
            self._sessions.require(session_id)
            return self._admission.create(f"{session_id}:train:{number}", job)

    def _close_all(self, session_id: str) -> None:
        for id in [id for id in self._state.queues if id.startswith(f"{session_id}:")]:
            sampler = id in self._state.ledger.samplers
            self._admission.close(id, Close("close_sampler" if sampler else "close_model"))

    def _sweep(self, now: float) -> None:
        full = self._state.operations.results_bytes > self._limits.results_bytes
        if now - self._swept < _SWEEP and not full:
            return
        self._swept = now
        self._state.operations.sweep(now)
        for session_id in self._sessions.expired():
            if self._sessions.finish(session_id):
                self._close_all(session_id)

    def _count(self, pending: PendingOperation) -> None:
        self._ended[pending.status] += 1
        self._on_end(pending)
