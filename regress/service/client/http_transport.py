"""Requests over HTTP with retries that cannot execute anything twice, and every failure as one sentence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from regress.errors import reason
from regress.service.client.client_settings import Endpoint
from regress.service.service_api import ServiceError

TRIES = 3
PAUSE = 0.2
"""Seconds before the first retry; they double."""
SLOW_READ = 60.0
"""Seconds that a reply may take: longer than the long polls of services."""


@dataclass(frozen=True)
class Reply:
    """Answer of the service with a status of success, or one that the caller expects."""

    response: httpx.Response
    endpoint: Endpoint

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.response.status_code

    @property
    def type(self) -> str:
        """Media type of the content."""
        return str(self.response.headers.get("content-type", ""))

    @property
    def content(self) -> bytes:
        """Body as it is."""
        return self.response.content

    def json(self) -> Any:
        """Return the body as a tree.

        Raises:
            ServiceError: if it is not valid JSON.
        """
        try:
            return self.response.json()
        except ValueError as error:
            raise ServiceError(
                f"""the service at {self.endpoint.shown} answered with no JSON; is this the address of a
                {self.endpoint.wire} service?""",
                code="unexpected_reply",
                category="server",
            ) from error


class Transport:
    """Connection to one service. Proxies are taken from the environment, ``NO_PROXY`` included.

    Args:
        header: name of the header that holds the key.
    """

    def __init__(self, endpoint: Endpoint, header: str) -> None:
        self._endpoint = endpoint
        self._client = httpx.Client(
            base_url=endpoint.base_url,
            headers={header: endpoint.api_key, "User-Agent": "regress"},
            timeout=httpx.Timeout(SLOW_READ, connect=10.0),
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=16),
        )

    def get(self, path: str, expected: tuple[int, ...] = ()) -> Reply:
        """Return the reply to a request that changes nothing; lost connections and busy services are tried again."""
        return self._request("GET", path, None, {}, expected, repeatable=True)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        expected: tuple[int, ...] = (),
        repeatable: bool = False,
    ) -> Reply:
        """Return the reply to a request.

        Args:
            body: value to send as JSON, if there is no ``content``.
            expected: statuses besides those of success that are not a failure.
            repeatable: the service executes it once however often it is sent, because of its sequence number.
        """
        return self._request(
            "POST", path, body if content is None else content, headers or {}, expected, repeatable=repeatable
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _request(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        expected: tuple[int, ...],
        *,
        repeatable: bool,
    ) -> Reply:
        sent: dict[str, Any] = {}
        if isinstance(body, bytes):
            sent["content"] = body
        elif body is not None:
            sent["json"] = body
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                found = self._client.request(method, path, headers=dict(headers), **sent)
            except httpx.ConnectError as error:  # nothing was sent
                if last:
                    raise self._unreachable(error) from error
            except httpx.HTTPError as error:
                if last or not repeatable:
                    raise self._unreachable(error) from error
            else:
                if found.is_success or found.status_code in expected:
                    return Reply(found, self._endpoint)
                busy = found.status_code == 429 or (found.status_code >= 500 and repeatable)
                if last or not busy:
                    raise self._refused(path, found)
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError

    def _unreachable(self, error: Exception) -> ServiceError:
        wire = self._endpoint.wire
        return ServiceError(
            f"""the service at {self._endpoint.shown} cannot be reached ({reason(error)}); start it, correct
            service.{wire}_service.base_url, or name its host in NO_PROXY if a proxy stands between""",
            code="unreachable",
            category="server",
            retryable=True,
        )

    def _refused(self, path: str, found: httpx.Response) -> ServiceError:
        wire, status = self._endpoint.wire, found.status_code
        if status in (401, 403):
            return ServiceError(
                f"the service at {self._endpoint.shown} does not accept the key; set {wire.upper()}_API_KEY",
                code="unauthorized",
            )
        message = _message(found)
        return ServiceError(
            f"the service at {self._endpoint.shown} refused {path} with status {status}: {message}",
            code="refused",
            category="user" if status < 500 else "server",
        )


def _message(found: httpx.Response) -> str:
    """Return what a reply of any wire tells about a failure, on one line."""
    try:
        tree = found.json()
    except ValueError:
        return " ".join(found.text.split())[:300] or "no reason given"
    if isinstance(tree, dict):
        for name in ("message", "error_message", "detail", "error"):
            if isinstance(tree.get(name), str) and tree[name]:
                return " ".join(tree[name].split())
    return " ".join(str(tree).split())[:300]
