"""Log of operations: one line for each that has ended, as text or JSON."""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime
from typing import IO

from regress.service.core.operations import Ticket


class OperationLog:
    """Writes a line for each operation that has ended; no content of requests is in it.

    Args:
        format: one of `FORMATS`.
        stream: where to; standard error by default.
    """

    def __init__(self, format: str, stream: IO[str] | None = None) -> None:
        self._format, self._stream = format, stream
        self._lock = threading.Lock()

    def __call__(self, ticket: Ticket) -> None:
        """Write the line of an operation."""
        if self._format == "none":
            return
        line = _json(ticket) if self._format == "json" else _text(ticket)
        with self._lock:
            print(line, file=self._stream or sys.stderr, flush=True)


def _json(ticket: Ticket) -> str:
    error = ticket.error
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "operation": ticket.id,
            "model": ticket.model_id,
            "queue": ticket.lane,
            "kind": ticket.kind,
            "seq_id": ticket.seq,
            "status": ticket.status.value,
            "error": None if error is None else error.code,
            "message": None if error is None else str(error),
            "waited_s": round(_waited(ticket), 6),
            "ran_s": round(_ran(ticket), 6),
            "request_bytes": ticket.size,
            "result_bytes": ticket.result_size,
        }
    )


def _text(ticket: Ticket) -> str:
    time = datetime.now(UTC).strftime("%H:%M:%S")
    end = "" if ticket.error is None else f": {ticket.error}"
    return f"{time} {ticket.lane} {ticket.name} {ticket.status.value} in {_ran(ticket):.3f} s{end}"


def _waited(ticket: Ticket) -> float:
    return (ticket.started or ticket.finished or ticket.accepted) - ticket.accepted


def _ran(ticket: Ticket) -> float:
    return 0.0 if ticket.started is None or ticket.finished is None else ticket.finished - ticket.started
