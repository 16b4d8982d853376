"""Definition of a wire protocol: its routes, and functions that turn a request into a reply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regress.service.service_api import Array, Operation, SamplingResult, Service, ServiceError
from regress.service.wires.app_settings import Limits

Show = Callable[[Any], Mapping[str, Any]]
"""Function that returns a result of one type as JSON."""


def shown_result(result: object, shows: Mapping[type, Show]) -> Mapping[str, Any]:
    """Return the result of an operation as JSON.

    Args:
        shows: how a protocol shows each type of result.

    Raises:
        ServiceError: only another protocol asks for such an operation.
    """
    for kind, show in shows.items():
        if isinstance(result, kind):
            return show(result)
    raise ServiceError(
        "the result of this operation has no form in this protocol; ask by the one that started it"
    )


def numbers(array: Array) -> list[float | None]:
    """Return numbers as float32, row after row, and None for those that JSON has not."""
    rounded = array.astype(np.float32).ravel()
    if np.isfinite(rounded).all():
        return [*rounded.tolist()]
    return [float(value) if np.isfinite(value) else None for value in rounded]


def completions(result: SamplingResult, *, texts: bool) -> dict[str, Any]:
    """Return sampled completions, with their texts if the protocol has them."""
    sequences = []
    for sequence in result.sequences:
        shown: dict[str, Any] = {
            "tokens": sequence.tokens.tolist(),
            "logprobs": numbers(sequence.logprobs),
            "stop_reason": sequence.stop_reason,
        }
        sequences.append({**shown, "text": sequence.text} if texts else shown)
    found: dict[str, Any] = {"sequences": sequences}
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = numbers(result.prompt_logprobs)
    return found


JSON = "application/json"

_STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "too_slow": 408,
    "too_large": 413,
    "unsupported_media_type": 415,
}


@dataclass(frozen=True)
class Call:
    """One request: who asks, the variables of its path, its headers in lower case, and its body after expansion."""

    service: Service
    limits: Limits
    owner: str
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def own(self, thing_id: str) -> str:
        """Return the id of a session, or of one of its models or samplers, if the API key of the request owns it.

        Raises:
            ServiceError: it belongs to another key, or it does not exist; the sentence does not tell which.
        """
        try:
            metadata = self.service.session_metadata(thing_id.partition(":")[0])
        except ServiceError as error:
            if error.code != "not_found":
                raise
            metadata = {}
        if not metadata or metadata.get("owner") != self.owner:
            raise not_found(thing_id)
        return thing_id

    def operation(self, operation_id: str) -> Operation:
        """Return the state of an operation of a model that the API key of the request owns.

        Raises:
            ServiceError: there is none.
        """
        found = self.service.operation(operation_id)
        if found.model_id is not None:
            self.own(found.model_id)
        return found


@dataclass(frozen=True)
class Reply:
    """Reply that the client gets."""

    content: bytes
    status: int = 200
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Reply that waits for an operation to end, ``timeout`` seconds at the most."""

    operation_id: str
    timeout: float
    then: Callable[[Operation], Reply]


Handler = Callable[[Call], "Reply | Wait"]


@dataclass(frozen=True)
class Route:
    """Method and path of a request (variables in braces), and who answers it; ``empty`` if its body is not read."""

    method: str
    path: str
    handler: Handler
    empty: bool = False


@dataclass(frozen=True)
class Wire:
    """A wire protocol.

    Attributes:
        name: as in the settings.
        key_header: header of the API key, in lower case.
        busy: HTTP status at which the clients of this protocol come again later.
        routes: its requests.
    """

    name: str
    key_header: str
    busy: int
    routes: Sequence[Route]


def not_found(thing_id: str) -> ServiceError:
    """Return the error for an id that does not exist, or that another API key owns."""
    return ServiceError(
        f"{shown(thing_id)} is not the id of anything this API key owns; use an id that the service returned",
        code="not_found",
    )


def status_of(error: ServiceError, busy: int) -> int:
    """Return the HTTP status of an error."""
    if error.code in _STATUS:
        return _STATUS[error.code]
    if error.retryable:
        return busy
    return 400 if error.category == "user" else 500


def error_reply(error: ServiceError, busy: int = 503) -> Reply:
    """Return an error as clients of all protocols read it."""
    content = {
        "error": error.code,
        "message": str(error),
        "category": error.category,
        "retryable": error.retryable,
    }
    headers = {"Retry-After": "1"} if error.retryable else {}
    return json_reply(content, status_of(error, busy), headers)


def json_reply(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return JSON in ASCII; a number that is not finite is ``null``."""
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    return Reply(text.encode("ascii"), status, JSON, headers or {})


def shown(text: str, width: int = 80) -> str:
    """Return a client's text for a sentence: quoted, in ASCII, and cut."""
    return ascii(text if len(text) <= width else text[: width - 3] + "...")


def shown_name(name: str) -> str:
    """Return a client's own name as it may stand in a sentence."""
    return name if name.isascii() and name.isprintable() and len(name) <= 80 else shown(name)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def batch_limits(limits: Limits) -> dict[str, int]:
    """Return what a reply tells our own clients of the prompts that one request may hold."""
    return {"completions": limits.samples, "tokens": limits.tokens}


def spending(
    service: Service,
    model_id: str,
    seq_id: int | None,
    submit: Callable[[], Operation],
    problem: ServiceError | None = None,
) -> tuple[Operation | None, ServiceError | None]:
    """Submit a request, or spend its sequence number on the error that refuses it.

    Args:
        service: the service.
        model_id: model that the client owns.
        seq_id: number of the request, None if it has none.
        submit: reads the content of the request, and submits it.
        problem: why the request is refused whatever it holds.

    Returns:
        The operation, and the error if the request was refused; no operation if it has no number.

    Raises:
        ServiceError: the service is too busy, or the model does not exist: the number is not spent.
        Exception: the service itself has failed: the number is spent.
    """
    try:
        if problem is not None:
            raise problem
        return submit(), None
    except ServiceError as error:
        if error.retryable:
            raise
        if seq_id is None:
            return None, error
        return service.fail(model_id, seq_id, error), error  # raises, too, if there is no such model
    except Exception:
        if seq_id is not None:
            with suppress(ServiceError):
                service.fail(model_id, seq_id, _INTERNAL)
        raise


_INTERNAL = ServiceError(
    "the service has failed while it read the request; its log says why", code="internal", category="server"
)
