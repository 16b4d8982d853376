"""Execution of the host's methods: where the models are, and how long a call may take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from regress.errors import RegressError, reason
from regress.service.service_api import Host, ServiceError

OpenHost = Callable[[], AbstractContextManager[Host]]
"""Opens a host on one rank; it can be pickled where ranks are processes of their own."""


@dataclass(frozen=True)
class HostCall:
    """Call of a method of the host."""

    method: str
    arguments: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def on(self, host: Host) -> Any:
        """Return what the method returns."""
        return getattr(host, self.method)(*self.arguments, **self.settings)


class HostLostError(ServiceError):
    """The models of a host are gone or in an unknown state: it has to be started again."""


class HostFailedError(ServiceError):
    """A call of the host ended by an unexpected error, which may have left its model half changed."""


class Executor(Protocol):
    """Calls the methods of a `Host`, one after another, on all of its ranks."""

    world_size: int

    def start(self) -> None:
        """Start the ranks; raises `ServiceError` if they cannot be."""

    def call(self, call: HostCall, timeout: float) -> Any:
        """Return the result of a call, within ``timeout`` s.

        Raises:
            HostLostError: a rank died, hangs, or the ranks disagree.
            Exception: what the host raises.
        """

    def restart(self) -> None:
        """Start again with a host that has no models."""

    def close(self) -> None:
        """End the ranks."""


def as_service_error(error: BaseException, what: str) -> ServiceError:
    """Return an error of the host as one for clients, without a traceback."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, RegressError):
        return HostFailedError(str(error), code="refused")
    return HostFailedError(
        f"{what} failed in the service ({reason(error)}); its log has the traceback",
        code="internal",
        category="server",
    )


class InProcess:
    """Host in a thread of this process.

    Args:
        open_host: opens the host, in that thread.
    """

    world_size = 1

    def __init__(self, open_host: OpenHost) -> None:
        self._open_host = open_host
        self._thread: _HostThread | None = None

    def start(self) -> None:
        """Start the thread."""
        thread = _HostThread(self._open_host)
        thread.opened.result()
        self._thread = thread

    def call(self, call: HostCall, timeout: float) -> Any:
        """Return the result of a call; one that takes too long is waited for by `restart`."""
        if self._thread is None:
            raise HostLostError("the host is not running", code="internal", category="server")
        future = self._thread.submit(call)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
            raise HostLostError(
                f"""{call.method} did not come to an end within {timeout:g} s; make the request smaller, or raise
                --operation-timeout""",
                code="timeout",
                category="server",
            ) from None

    def restart(self) -> None:
        """Wait for the call that took too long, and open the host anew."""
        self.close()  # one that cannot be ended is waited for
        self.start()

    def close(self) -> None:
        """End the thread after the call that it is in."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class _HostThread:
    """Thread that opens a host and calls its methods in the order of their submission."""

    def __init__(self, open_host: OpenHost) -> None:
        self._calls: queue.SimpleQueue[tuple[HostCall, Future[Any]] | None] = queue.SimpleQueue()
        self.opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[open_host], name="regress-host", daemon=True)
        self._thread.start()

    def submit(self, call: HostCall) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _run(self, open_host: OpenHost) -> None:
        try:
            with open_host() as host:
                self.opened.set_result(None)
                while (item := self._calls.get()) is not None:
                    _answer(host, *item)
                    del item
        except BaseException as error:  # whoever waits gets it
            if self.opened.done():
                raise
            self.opened.set_exception(error)


def _answer(host: Host, call: HostCall, future: Future[Any]) -> None:
    try:
        value = call.on(host)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
