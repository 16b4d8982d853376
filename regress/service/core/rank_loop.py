"""Ranks of a service: each opens a host, and makes the calls that the service broadcasts.

A launcher's ranks are watched: asked in trouble, each tells if it waits for the others or not.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from regress.errors import lost_connection
from regress.service.core.host_executor import HostCall, HostLostError, OpenHost, as_service_error
from regress.service.core.request_digest import content_of
from regress.service.service_api import Host, OptimResult

_COLLECTIVE = "torch/distributed/distributed_c10d.py"
_ASKED, _WAITS, _BUSY = "asked", b"waits", b"busy"
_EVER = timedelta(days=3650)
_PATIENCE = timedelta(seconds=5)
"""Time in which a rank that can answer does."""


class Watch:
    """One rank's part of the watch; the thread that makes it is the one that is watched.

    Args:
        rank: the rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._watched = threading.get_ident()
        if rank:
            threading.Thread(target=self._answer, name="regress-watch", daemon=True).start()

    def hanging(self) -> list[int]:
        """Return the ranks that do not wait for others, or do not answer; asked on the first rank.

        Empty if nothing can be learned.
        """
        own = _WAITS if self._waits() else _BUSY
        answers = self._answers()
        return [rank for rank, answer in {0: own, **answers}.items() if answer != _WAITS] if answers else []

    def silent(self) -> list[int]:
        """Return the ranks that do not answer; asked on the first rank. Empty if nothing can be learned."""
        return [rank for rank, answer in self._answers().items() if answer is None]

    def _answers(self) -> dict[int, bytes | None]:
        with suppress(Exception):  # the store may have gone with the launcher
            store = _store()
            store.set(_ASKED, b"1")
            return {rank: _last_words(store, rank) for rank in range(1, self._world_size)}
        return {}

    def _answer(self) -> None:
        with suppress(Exception):  # the service ends
            store = _store()
            store.wait([_ASKED], _EVER)
            store.set(f"rank{self._rank}", _WAITS if self._waits() else _BUSY)

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COLLECTIVE):
                return True
            frame = frame.f_back
        return False


def _last_words(store: Any, rank: int) -> bytes | None:
    try:
        store.wait([f"rank{rank}"], _PATIENCE)
        return bytes(store.get(f"rank{rank}"))
    except Exception:  # the rank has ended, or is stopped
        return None


def named(ranks: list[int], world_size: int) -> str:
    """Return the ranks as the beginning of a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {world_size}"


def _store() -> Any:
    """Return a connection of one's own to the store of the ranks: a wait keeps no other thread waiting."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    return PrefixStore("regress-watch", default.clone())


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
                f"rank {other.rank} of {len(answers)} {_ending(other)} in {call.method}, and rank 0 {_ending(first)}",
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


def _ending(answer: Answer) -> str:
    return "succeeded otherwise" if answer.error is None else f"failed ({answer.error})"
