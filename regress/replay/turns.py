"""What the processes of a test session owe one another: turns at what they share, and errors as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from filelock import FileLock, Timeout

from regress.errors import RegressError, ReplayError, reason

TIMEOUT = 600.0
"""Seconds to wait for what another process computes. A process that dies gives its turn back at once."""


@contextmanager
def turn(path: Path, what: str) -> Iterator[None]:
    """Have ``path`` to oneself among the processes of the session.

    Raises:
        ReplayError: naming ``what``, if another process does not come to an end.
    """
    lock = FileLock(f"{path}.lock", timeout=TIMEOUT)
    try:
        lock.acquire()
    except Timeout:
        raise ReplayError(
            f"{what} has been computed by another process for {TIMEOUT:g} s without an end; run it alone with -n 0 to "
            "see where it hangs"
        ) from None
    try:
        yield
    finally:
        lock.release()


def stated(error: Exception) -> str:
    """An error in words: ours as it is, with its notes, any other on one line with its type and where it was raised."""
    if isinstance(error, RegressError):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    frames = extract_tb(error.__traceback__)
    where = f", raised at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{reason(error)}{where}"
