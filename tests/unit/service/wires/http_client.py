"""A plain HTTP client on one connection."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from regress.service.wires.http_server import ThreadedServer


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of a reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests with the same headers."""

    def __init__(self, server: ThreadedServer, headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        self.headers = dict(headers or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def send(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request; a body that is not a bytes is sent as JSON."""
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, content, sent)
        reply = self._connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, found, reply.read())

    def post(self, path: str, body: object = None, **headers: str) -> Answer:
        """Send a POST; underscores of the headers' names are hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send("POST", f"/api/v1/{path}", {} if body is None else body, named)

    def get(self, path: str) -> Answer:
        """Send a GET."""
        return self.send("GET", f"/api/v1/{path}")
