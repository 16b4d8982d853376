"""Coordination between the processes of a test session: locks on shared files, and errors as sentences."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb

from filelock import FileLock, Timeout

from regress.errors import RegressError, ReplayError, reason
from regress.parallel.launch.job_standstill import REMEDY, STANDSTILL, STOPPED, Standstill

TIMEOUT = 600.0
"""Seconds to wait for another process's computation. A process that dies releases its lock at once."""


@contextmanager
def interprocess_lock(path: Path, what: str) -> Iterator[None]:
    """Lock ``path`` against the other processes of the session.

    Raises:
        ReplayError: naming ``what``, if another process is stopped, or does not come to an end.
    """
    lock, end, others = FileLock(f"{path}.lock"), time.monotonic() + TIMEOUT, LockHolders(what)
    while not lock.is_locked:
        with suppress(Timeout):
            lock.acquire(timeout=max(0.0, min(end, others.due) - time.monotonic()))
            break
        others.require_running([lock])
        if time.monotonic() >= end:
            raise ReplayError(f"""{what} has been computed by another process for {TIMEOUT:g} s without an end; run it
            alone with -n 0 to see where it hangs""")
    try:
        yield
    finally:
        lock.release()


class LockHolders:
    """Judge of the processes that hold what this one waits for.

    Args:
        what: what waits.
    """

    def __init__(self, what: str) -> None:
        self._what, self._standstill = what, Standstill(STANDSTILL, idle=False)

    @property
    def due(self) -> float:
        """Time of the next look, on the clock of the machine, s."""
        return self._standstill.due

    def require_running(self, locks: Iterable[FileLock]) -> None:
        """Raise `ReplayError` naming a process that holds one of these locks and has been stopped for too long."""
        if time.monotonic() >= self.due and (stopped := self._standstill.look({*_holders(locks)})):
            raise ReplayError(
                f"{self._what} waits for another process of this run (process {stopped}), which {STOPPED}: {REMEDY}"
            )


def _holders(locks: Iterable[FileLock]) -> Iterator[int]:
    """Yield the processes that hold locks; none where the system does not tell."""
    ids = set()
    for lock in locks:
        with suppress(OSError):
            found = Path(lock.lock_file).stat()
            ids.add(f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}")
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            kind, _, _, process, file = line.split()[1:6]
            if kind == "FLOCK" and file in ids and int(process) > 0:
                yield int(process)


def stated(error: Exception) -> str:
    """Return an error in words: ours with its notes, any other on one line with its type and location."""
    if isinstance(error, RegressError):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    frames = extract_tb(error.__traceback__)
    where = f", raised at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{reason(error)}{where}"
