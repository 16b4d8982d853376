"""Ranks of a service: each opens a host, and makes the calls that the service broadcasts."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from regress.errors import lost_connection
from regress.service.api import Host, OptimResult
from regress.service.core.content import content_of
from regress.service.core.executor import HostCall, HostLostError, OpenHost, as_service_error

log = logging.getLogger("regress.service")


@dataclass(frozen=True)
class Answer:
    """Result of a call on one rank.

    Attributes:
        rank: the rank.
        value: what the first rank returned; None from the others.
        error: what was raised instead.
        digest: digest of what all ranks must agree on.
    """

    rank: int
    value: Any
    error: Exception | None
    digest: str


def answered(host: Host, call: HostCall, rank: int) -> Answer:
    """Return the result of a call of this rank's host.

    Raises:
        HostLostError: if another rank was lost on the way.
    """
    try:
        value = call.on(host)
    except OSError as error:
        return Answer(rank, None, error, content_of(type(error).__name__).digest)
    except Exception as error:
        if lost_connection(error):
            raise
        shown = as_service_error(error, call.method)
        if shown is not error:
            log.exception("%s failed on rank %d", call.method, rank)
        return Answer(rank, None, shown, content_of(shown.code, str(shown)).digest)
    agreed = value if isinstance(value, int | OptimResult) else None
    return Answer(rank, value if rank == 0 else None, None, content_of(agreed).digest)


def agreed(answers: list[Answer], call: HostCall) -> Any:
    """Return the value of the first rank, or raise its error.

    Args:
        answers: of all ranks, by rank.

    Raises:
        HostLostError: if another rank has another result.
    """
    first = answers[0]
    for other in answers[1:]:
        if other.digest != first.digest:
            raise HostLostError(
                f"rank {other.rank} of {len(answers)} {_told(other)} in {call.method}, and rank 0 {_told(first)}",
                code="rank_failed",
                category="server",
            )
    if first.error is not None:
        raise first.error
    return first.value


def serve_rank(address: str, open_host: OpenHost) -> None:
    """Make the calls that come over the socket at an address, until its other end is closed."""
    rank = int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        connection: Connection[Any, Any] = Connection(os.dup(connected.fileno()))
    with connection, open_host() as host, suppress(EOFError, ConnectionError):
        connection.send(rank)
        while (call := connection.recv()) is not None:
            connection.send(answered(host, call, rank))


def _told(answer: Answer) -> str:
    return "succeeded otherwise" if answer.error is None else f"failed ({answer.error})"
