"""Coordination between the processes of a test session: locks on shared files, and errors as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from filelock import FileLock, Timeout

from regress.errors import RegressError, ReplayError, reason

TIMEOUT = 600.0
"""Seconds to wait for another process's computation. A process that dies releases its lock at once."""


@contextmanager
def interprocess_lock(path: Path, what: str) -> Iterator[None]:
    """Lock ``path`` against the other processes of the session.

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
    """Return an error in words: ours with its notes, any other on one line with its type and location."""
    if isinstance(error, RegressError):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    frames = extract_tb(error.__traceback__)
    where = f", raised at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{reason(error)}{where}"
