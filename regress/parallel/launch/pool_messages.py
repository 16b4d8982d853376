"""Messages between the processes of a rank pool: the pool, its forkserver, and the ranks. Loads no torch."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from regress.errors import RegressError, lost_connection, reason


@dataclass(frozen=True)
class Start:
    """Pool to forkserver: fork the ranks of a job. A report pipe and a log follow for each rank, as file descriptors.

    Attributes:
        world_size: number of ranks.
        payload: target and keyword arguments, pickled; a rank unpickles them.
        environment: the environment variables of the ranks, all of them.
        path: folders where they look for modules.
        directory: their working directory.
        backend: backend of the process group.
        patience: seconds that a collective may take.
    """

    world_size: int
    payload: bytes
    environment: Mapping[str, str]
    path: tuple[str, ...]
    directory: str
    backend: str
    patience: float


@dataclass(frozen=True)
class Signal:
    """Pool to forkserver: send a signal to some ranks that have not ended, and to all that they have started."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """Forkserver to pool: everything is imported; ``problem`` names what could not be."""

    problem: str | None = None


@dataclass(frozen=True)
class Forked:
    """Forkserver to pool: a rank is this process."""

    rank: int
    process: int


@dataclass(frozen=True)
class Ended:
    """Forkserver to pool: a rank has ended; ``status`` is its exit code, or minus the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class Tapped:
    """Rank to pool: it has recorded a value of this stage at this place, such as ``step0/rank1/micro0``."""

    record_type: str
    place: str


@dataclass(frozen=True)
class Done:
    """Rank to pool: the target has returned this value. The rank stays until all have."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """Rank to pool: the target has raised.

    Attributes:
        error: type and message on one line.
        trace: the traceback; empty for an error of this package, whose sentence says it all.
        connection: True if it is a communication error, which another rank may have caused.
        at: when, on the clock of the machine, s.
    """

    error: str
    trace: str
    connection: bool = False
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Return the report of an exception."""
        error = error.with_traceback(_inner(error.__traceback__))
        connection = lost_connection(error)
        trace = "" if isinstance(error, RegressError) else "".join(traceback.format_exception(error)).rstrip()
        return cls(_SOURCE.sub("", reason(error, limit=400)), trace, connection)


def _inner(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that only lead to the target."""
    while (
        trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.endswith(_ENTRY)
    ):
        trace = trace.tb_next
    return trace


_ENTRY = "regress/parallel/launch/forked_rank.py"
_SOURCE = re.compile(r"\[\S+\.cc:\d+\] ")
"""Source location that gloo adds to messages, in the folder of whoever built it."""
