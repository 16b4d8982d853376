"""CPU slots for ranks, shared among the processes of a session: each takes as many as its replay has ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from regress.replay.interprocess_lock import LockHolders, interprocess_lock

_PAUSE = 0.02
"""Seconds between two looks for a slot; only one process looks at a time."""

PER_PROCESSOR = 2
"""Ranks per processor at a time: they wait for one another. Measured with two workers of pytest on two
processors, 65 replays of 1 to 8 ranks: 157 s with one, 117 s with two.
"""


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


class CpuSlots:
    """Fixed number of slots, by default `PER_PROCESSOR` for each processor, as locks below ``root``.

    A waiting process holds the gate, so that processes that need few slots do not starve one that needs many.
    A process that dies releases its slots.
    """

    def __init__(self, root: Path, count: int | None = None) -> None:
        self._root, self._count = root, count or PER_PROCESSOR * processors()

    @contextmanager
    def taken(self, count: int, what: str) -> Iterator[None]:
        """Hold ``wanted`` slots, or all if there are fewer; raises `ReplayError` if others never release any."""
        self._root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            with interprocess_lock(self._root / "gate", what):
                self._take(min(count, self._count), locks, what)
            yield

    def _take(self, count: int, locks: ExitStack, what: str) -> None:
        others = LockHolders(what)
        free = [FileLock(self._root / f"{index}.lock") for index in range(self._count)]
        while count:
            for lock in list(free):
                try:
                    locks.enter_context(lock.acquire(timeout=0))
                except Timeout:
                    continue
                free.remove(lock)
                count -= 1
                if not count:
                    return
            others.require_running(free)
            time.sleep(_PAUSE)
