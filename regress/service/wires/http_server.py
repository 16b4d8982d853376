"""HTTP server of the application: uvicorn on sockets that are open before it starts."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn
from fastapi import FastAPI

from regress.service.service_api import ServiceError
from regress.service.wires.app_settings import Limits

_START_SECONDS = 30.0


def http_server(app: FastAPI, limits: Limits, *, grace: float = 30.0) -> uvicorn.Server:
    """Return the server of an application, which neither logs requests nor takes over signals that are handled.

    Args:
        app: the application.
        limits: bounds; ``connections`` is the server's.
        grace: seconds that open requests have to end after it is asked to stop.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(grace),
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=65536,
        http="h11",
        ws="none",
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is a free one.

    Raises:
        ServiceError: the address cannot be bound.
    """
    try:
        found = socket.create_server((host, port), backlog=512)
        # asyncio sets it only for sockets that name their protocol; without it every reply of a connection waits 40 ms
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    except OSError as error:
        raise ServiceError(
            f"the service cannot listen on {host}:{port} ({error.strerror}); choose another port",
            code="address",
        ) from None


class ThreadedServer:
    """Server in a thread of this process, for tests and programs of one's own; ``url`` is where it listens.

    Args:
        app: the application.
        limits: bounds.
        host: address to listen on.
        port: port to listen on, 0: a free one.
    """

    def __init__(
        self, app: FastAPI, limits: Limits | None = None, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._server = http_server(app, limits or Limits(), grace=2)
        self._socket = listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="regress-http", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise ServiceError("the HTTP server did not start", code="server", category="server")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_START_SECONDS)
        self._socket.close()
