"""HTTP application of the training service: keys, bodies, waiting and errors, the same for every wire.

A new wire is a file, and a line of `WIRES`. Clients wait for operations in threads while there are some, else by looks
every few milliseconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from regress.service.service_api import Operation, Service, ServiceError, Status
from regress.service.wires.app_settings import Settings
from regress.service.wires.request_bodies import Bodies
from regress.service.wires.tinker_wire import TINKER
from regress.service.wires.weaver_wire import WEAVER
from regress.service.wires.wire_protocol import Call, Reply, Route, Wait, Wire, error_reply, json_reply

_BEARER = "bearer "


class Keys:
    """Known keys.

    Args:
        keys: keys by the name of their owner.
        headers: names of the headers that have a key, beside ``Authorization: Bearer``.
    """

    def __init__(self, keys: Mapping[str, str], headers: Sequence[str]) -> None:
        if not keys or not all(keys.values()):
            raise ServiceError(
                "the service has no API key; set one, and give it to the clients", code="no_key"
            )
        self._digests = {owner: _digest(key) for owner, key in keys.items()}
        self._headers = tuple(dict.fromkeys(headers))

    def owner(self, headers: Mapping[str, str]) -> str:
        """Return the owner of a request's key.

        Raises:
            ServiceError: there is no key, or no such key.
        """
        found = self._find(headers)
        if found is None:
            names = ", ".join((*self._headers, "authorization: bearer"))
            raise ServiceError(f"the API key is missing or unknown; send one in {names}", code="unauthorized")
        return found

    def known(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request has a known key."""
        return self._find(headers) is not None

    def _find(self, headers: Mapping[str, str]) -> str | None:
        sent = [headers[name] for name in self._headers if name in headers]
        bearer = headers.get("authorization", "")
        if bearer.lower().startswith(_BEARER):
            sent.append(bearer[len(_BEARER) :].strip())
        owner = None
        for digest in map(_digest, sent):
            for name, known in self._digests.items():  # all of them, whichever fits
                if hmac.compare_digest(digest, known):
                    owner = name
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


PREFIX = "regress_service_"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Counters:
    """Counts of answered requests, by wire, route and status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, wire: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        with self._lock:
            self._requests[wire, route, status] += 1
            self._seconds[wire, route] += seconds

    def text(self, service: Mapping[str, float]) -> str:
        """Return all numbers in Prometheus' text format."""
        lines = []
        for name, value in sorted(service.items()):
            bare, brace, labels = name.partition("{")
            lines.append(f"{PREFIX}{re.sub(r'[^a-zA-Z0-9_]', '_', bare)}{brace}{labels} {_number(value)}")
        with self._lock:
            lines.append(f"# TYPE {PREFIX}http_requests_total counter")
            for (wire, route, status), count in sorted(self._requests.items()):
                labels = f'wire="{wire}",route="{route}",status="{status}"'
                lines.append(f"{PREFIX}http_requests_total{{{labels}}} {count}")
            lines.append(f"# TYPE {PREFIX}http_seconds_total counter")
            for (wire, route), seconds in sorted(self._seconds.items()):
                labels = f'wire="{wire}",route="{route}"'
                lines.append(f"{PREFIX}http_seconds_total{{{labels}}} {_number(seconds)}")
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


_SLICE = 0.5
_SHORTEST = 0.002
_LONGEST = 0.05

FINAL = (Status.DONE, Status.FAILED)


class Waiter:
    """Waits for operations on behalf of many clients.

    Args:
        service: the service that runs them.
        threads: waits in a thread of their own, which end with the operation at once.
    """

    def __init__(self, service: Service, threads: int) -> None:
        self._service = service
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="regress-wait")
        self._busy = 0
        self.closing = False

    async def wait(self, operation_id: str, timeout: float, left: Callable[[], Awaitable[bool]]) -> Operation:
        """Return the state of an operation when it is final, after ``timeout`` seconds, or when the client has left."""
        end = time.monotonic() + timeout
        found = self._service.operation(operation_id)
        pause = _SHORTEST
        while found.status not in FINAL and not self.closing and not await left():
            rest = end - time.monotonic()
            if rest <= 0:
                break
            if self._busy < self._threads:
                found = await self._in_thread(operation_id, min(rest, _SLICE))
            else:
                await asyncio.sleep(min(pause, rest))
                pause = min(2 * pause, _LONGEST)
                found = self._service.operation(operation_id)
        return found

    async def _in_thread(self, operation_id: str, timeout: float) -> Operation:
        self._busy += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, lambda: self._service.operation(operation_id, timeout=timeout)
            )
        finally:
            self._busy -= 1

    def close(self) -> None:
        """End the waits within half a second."""
        self.closing = True
        self._pool.shutdown(wait=False, cancel_futures=True)


WIRES: dict[str, Wire] = {wire.name: wire for wire in (WEAVER, TINKER)}


def chosen(names: Sequence[str] | None) -> list[Wire]:
    """Return the wires of some names, None: all.

    Raises:
        ServiceError: a name is unknown, or there is none.
    """
    if names is None:
        return [*WIRES.values()]
    unknown = [name for name in names if name not in WIRES]
    if unknown or not names:
        what = f"the wire {unknown[0]!r} is unknown" if unknown else "no wire is named"
        raise ServiceError(f"{what}; choose from {', '.join(WIRES)}", code="unknown_wire")
    return [WIRES[name] for name in dict.fromkeys(names)]


_BUSY_SECONDS = 0.05

log = logging.getLogger("regress.service.http")

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(service: Service, settings: Settings) -> FastAPI:
    """Return the application that serves a training service over the wires of the settings.

    Args:
        service: what runs the requests.
        settings: API keys, wires and limits.

    Raises:
        ServiceError: there are no API keys, or a wire is unknown.
    """
    wires = chosen(settings.wires)
    api = _Application(service, settings, wires)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        api.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.api = api
    for wire in wires:
        for route in wire.routes:
            app.add_api_route(
                route.path, api.endpoint(wire, route), methods=[route.method], response_model=None
            )
    for path in ("/healthz", "/api/v1/healthz"):
        app.add_api_route(path, api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _unexpected)
    return app


class _Application:
    """Path of every request: its key, its body, its handler, and the operation that it waits for."""

    def __init__(self, service: Service, settings: Settings, wires: Sequence[Wire]) -> None:
        self._service = service
        self._limits = settings.limits
        self._keys = Keys(settings.api_keys, [wire.key_header for wire in wires])
        self._counters = Counters()
        self.bodies = Bodies(settings.limits, len({*settings.api_keys}))
        self._waiter = Waiter(service, settings.limits.waiting)
        self._decoders = ThreadPoolExecutor(settings.limits.decoders, thread_name_prefix="regress-decode")
        self._encoders = ThreadPoolExecutor(settings.limits.decoders, thread_name_prefix="regress-encode")

    def close(self) -> None:
        """End what waits."""
        self._waiter.close()
        self._decoders.shutdown(wait=False)
        self._encoders.shutdown(wait=False)

    def endpoint(self, wire: Wire, route: Route) -> Endpoint:
        """Return the function that answers the requests of a route."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            try:
                reply = await self._answer(wire, route, request)
            except ServiceError as error:
                reply = error_reply(error, wire.busy)
            except Exception:
                reply = _unexpected_reply(request)
            self._counters.add(wire.name, route.path, reply.status, time.monotonic() - start)
            return _response(reply)

        answer.__name__ = f"{wire.name}_{route.path.rsplit('/', 1)[-1]}"
        return answer

    async def _answer(self, wire: Wire, route: Route, request: Request) -> Reply:
        owner = self._keys.owner(request.headers)
        async with self.bodies.read(request, owner) as body:
            call = Call(
                service=self._service,
                limits=self._limits,
                owner=owner,
                path=request.path_params,
                query=dict(request.query_params),
                headers={name.lower(): value for name, value in request.headers.items()},
                body=b"" if route.empty else body,
            )
            found = await self._handled(route, call)
        del call, body
        if isinstance(found, Reply):
            return found
        return await self._wait(found, request)

    async def _handled(self, route: Route, call: Call) -> Reply | Wait:
        """Hand a request to its handler; while the service is too busy, its client waits.

        Not all SDKs come again with the same number, which would be missing then.
        """
        loop = asyncio.get_running_loop()
        end = time.monotonic() + self._limits.answer_seconds
        pause = _BUSY_SECONDS
        while True:
            try:
                return await loop.run_in_executor(self._decoders, route.handler, call)
            except ServiceError as error:
                if error.code != "busy" or time.monotonic() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def _wait(self, wait: Wait, request: Request) -> Reply:
        operation = await self._waiter.wait(wait.operation_id, wait.timeout, request.is_disconnected)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, wait.then, operation)

    async def health(self, request: Request) -> Response:
        """Say that the service is there; no key is asked for, and nothing else is shown without one."""
        found = {"status": "ok", **self._service.health()}
        if not self._keys.known(request.headers):
            found = {"status": found["status"]}
        return _response(json_reply(found, 200 if found["status"] == "ok" else 503))

    async def metrics(self, request: Request) -> Response:
        """Return the numbers of the service for Prometheus."""
        try:
            self._keys.owner(request.headers)
            numbers = {**self._service.metrics(), "http_body_bytes_held": float(self.bodies.held)}
        except ServiceError as error:
            return _response(error_reply(error))
        return Response(self._counters.text(numbers), media_type=PROMETHEUS)


def _response(reply: Reply) -> Response:
    return Response(reply.content, reply.status, dict(reply.headers), reply.media_type)


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a path or a method that no wire has."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refused = ServiceError("this path has no such method", code="method_not_allowed")
    else:
        refused = ServiceError("no protocol of this service has such a path", code="not_found")
    reply = error_reply(refused)
    return _response(Reply(reply.content, error.status_code))


async def _unexpected(request: Request, error: Exception) -> Response:
    return _response(_unexpected_reply(request))


def _unexpected_reply(request: Request) -> Reply:
    """Log an error of the service itself, and answer with the number under which the log has it."""
    number = secrets.token_hex(4)
    log.exception("error %s at %s %s", number, request.method, request.url.path)
    return error_reply(
        ServiceError(
            f"the service has failed; its log says why under error {number}",
            code="internal",
            category="server",
        )
    )
