"""Process of a service that a test kills, at a moment that is counted in events and not in seconds."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from service_double import opened

from regress.service.core import sqlite_ledger
from regress.service.core.host_executor import HostCall, InProcess, OpenHost
from regress.service.core.training_service import CoreService

KEY = b"test"
ADDRESS = "socket"
_FILES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Moments:
    """Counts events: calls of the host, statements of the ledger, files of saves, and replies.

    Args:
        last: the number of the event at which the process kills itself, None for never.
    """

    def __init__(self, root: Path, last: int | None) -> None:
        self._root = str(root)
        self._numbers = itertools.count(1)
        self._last = last

    def __call__(self) -> None:
        if next(self._numbers) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Count what happens in this process from now on."""
        sys.addaudithook(self._of_file)
        sqlite_ledger.sqlite3.connect = partial(_traced, self, sqlite_ledger.sqlite3.connect)  # type: ignore[assignment]
        HostCall.on = _noted(self, HostCall.on, Path(self._root, "executed"))  # type: ignore[method-assign]

    def _of_file(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (writes or event in _FILES) and f"{self._root}/state/" in str(arguments[0]):
            self()


def _traced(moment: Moments, connect: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Open a database each statement of which is an event."""
    found = connect(*arguments, **settings)
    found.set_trace_callback(lambda _: moment())
    return found


def _noted(
    moment: Moments, on: Callable[[HostCall, Any], Any], executed: Path
) -> Callable[[HostCall, Any], Any]:
    def call(self: HostCall, host: Any) -> Any:
        moment()
        if self.method in ("run_pass", "optim_step"):
            where = self.arguments[2]
            with executed.open("a") as file:
                file.write(f"{where['model_id']} {where['seq_id']}\n")
        found = on(self, host)
        moment()
        return found

    return call


def engine(root: Path) -> OpenHost:
    """Return what opens the engine's host on a tiny model."""
    from host_requests import offer

    from regress.service.core.executor_choice import opened_host

    return partial(opened_host, {"tiny": offer()}, root / "host", {})


def serve(root: Path, host: str, last: int | None) -> None:
    """Serve one client on a socket in a folder until it leaves.

    Args:
        host: ``double``, which computes nothing, or ``engine``.
        last: event at which the process kills itself.
    """
    moment = Moments(root, last)
    moment.watch()
    open_host = engine(root) if host == "engine" else opened
    with Listener(str(root / ADDRESS), family="AF_UNIX", authkey=KEY) as listener:
        service = CoreService(InProcess(open_host), root / "state")
        with listener.accept() as client, suppress(EOFError):
            while True:
                method, arguments, settings = client.recv()
                try:
                    reply = True, getattr(service, method)(*arguments, **settings)
                except Exception as error:
                    reply = False, error
                moment()
                client.send(reply)
                moment()
        service.close()
