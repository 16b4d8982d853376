"""Run of ``regress serve``: from its options to its end, with a log of one line for each operation that has ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from regress.engine.config.config_schema import Config
from regress.errors import ConfigError, reason
from regress.optional_packages import install
from regress.service.core.executor_choice import executor_of, launched_rank, opened_host
from regress.service.core.operations import PendingOperation
from regress.service.core.service_limits import Limits
from regress.service.core.torchrun_executor import follow
from regress.service.wires.app_settings import Limits as RequestLimits

if TYPE_CHECKING:
    import uvicorn

    from regress.service.core.training_service import CoreService


class OperationLog:
    """Writes a line for each operation that has ended; no content of requests is in it.

    Args:
        format: one of `FORMATS`.
        stream: where to; standard error by default.
    """

    def __init__(self, format: str, stream: IO[str] | None = None) -> None:
        self._format, self._stream = format, stream
        self._lock = threading.Lock()

    def __call__(self, pending: PendingOperation) -> None:
        """Write the line of an operation."""
        if self._format == "none":
            return
        line = _json(pending) if self._format == "json" else _text(pending)
        with self._lock:
            print(line, file=self._stream or sys.stderr, flush=True)


def _json(pending: PendingOperation) -> str:
    error = pending.error
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "operation": pending.id,
            "model": pending.model_id,
            "queue": pending.queue,
            "kind": pending.kind,
            "seq_id": pending.seq,
            "status": pending.status.value,
            "error": None if error is None else error.code,
            "message": None if error is None else str(error),
            "waited_s": round(_waited(pending), 6),
            "ran_s": round(_ran(pending), 6),
            "request_bytes": pending.size,
            "result_bytes": pending.result_size,
        }
    )


def _text(pending: PendingOperation) -> str:
    time = datetime.now(UTC).strftime("%H:%M:%S")
    end = "" if pending.error is None else f": {pending.error}"
    return f"{time} {pending.queue} {pending.name} {pending.status.value} in {_ran(pending):.3f} s{end}"


def _waited(pending: PendingOperation) -> float:
    return (pending.started or pending.finished or pending.accepted) - pending.accepted


def _ran(pending: PendingOperation) -> float:
    return 0.0 if pending.started is None or pending.finished is None else pending.finished - pending.started


_READ = 5.0
"""Seconds for which clients can still fetch results after the last operation."""
_LOOK = 0.2


@dataclass(frozen=True)
class Serving:
    """Settings of a service.

    Attributes:
        configs: what is offered: configurations of the engine by name.
        api_keys: keys by the name of their owner.
        state: the state directory.
        wires: names of protocols, None: all.
        limits: limits of queues, models and times.
        requests: limits of one request and of its answer.
        drain_timeout: seconds in which a service that is asked to stop executes what is queued.
        log: format of the log of operations.
    """

    configs: Mapping[str, Config]
    api_keys: Mapping[str, str] = field(repr=False)
    state: Path
    host: str
    port: int
    wires: Sequence[str] | None
    limits: Limits
    requests: RequestLimits
    drain_timeout: float
    log: str


def serve(serving: Serving) -> int:
    """Serve until a signal ends it; returns the exit code.

    Of the ranks that a launcher has started, all but the first follow that one.

    Raises:
        ConfigError: for what cannot be served.
        ServiceError: if the ranks or the HTTP server cannot be started.
    """
    rank = launched_rank()
    if rank:
        follow(partial(opened_host, serving.configs, serving.state), rank)
        return 0
    wires = _wires()
    wires.chosen(serving.wires)
    sockets = [wires.listen(serving.host, serving.port)]
    settings = wires.Settings(serving.api_keys, serving.wires, serving.requests)
    executor = executor_of(serving.configs, serving.state)
    with _stop_asked() as stop:
        service = wires.CoreService(executor, serving.state, serving.limits, OperationLog(serving.log))
        server = wires.http_server(wires.create_app(service, settings), settings.limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="regress-http")
        thread.start()
        _announce(server, sockets[0].getsockname(), thread)
        code = _watch(stop, thread, lambda: getattr(executor, "lost", False))
        drained = code == 0 and service.drain(serving.drain_timeout)
        _let_read(service, stop)
        server.should_exit = True
        thread.join()
        if code == 0:
            service.close()
    if code:
        sys.stderr.flush()
        os._exit(code)  # a rank that was lost may keep threads of this process waiting for ever
    if not drained:
        print("some operations were not executed; a restart fails them by name", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Wires:
    """Parts of the service and of its HTTP side that need packages of the extra."""

    CoreService: Any
    listen: Any
    http_server: Any
    create_app: Any
    Settings: Any
    chosen: Any


def _wires() -> _Wires:
    try:
        from regress.service.core.training_service import CoreService
        from regress.service.wires.app_settings import Settings
        from regress.service.wires.http_app import chosen, create_app
        from regress.service.wires.http_server import http_server, listen
    except ImportError as error:
        raise ConfigError(f"""regress serve needs fastapi, uvicorn, protobuf and zstandard, not all of which are
        installed ({reason(error)}); run {install("service")}""") from error
    return _Wires(CoreService, listen, http_server, create_app, Settings, chosen)


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; a second one ends the process at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(server: uvicorn.Server, address: Sequence[Any], thread: threading.Thread) -> None:
    """Print where the service listens, once it does, as a line of JSON."""
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    host, port = address[:2]
    event = {"event": "listening", "host": host, "port": port, "url": f"http://{host}:{port}"}
    print(json.dumps({**event, "pid": os.getpid()}), flush=True)


def _watch(stop: threading.Event, thread: threading.Thread, lost: Any) -> int:
    """Wait for a signal, or for the end of what cannot go on; returns the exit code."""
    while not stop.wait(_LOOK):
        if lost():
            time.sleep(_READ)  # clients hear of it
            return 1
        if not thread.is_alive():
            return 1
    return 0


def _let_read(service: CoreService, stop: threading.Event) -> None:
    """Wait until clients have read all results, for some seconds."""
    end = time.monotonic() + _READ
    while service.metrics()["unread_operations"] and time.monotonic() < end:
        time.sleep(0.05)
