"""Standstill of a job: a process that a signal has stopped, or processes of which none does anything.

A slow job is none: on a busy machine a process that has something to compute is runnable even while it waits for a
processor. Progress is a report, a thread that runs, could run or waits for a disk, and processor time, of the processes
and of what they have started. Where there is no /proc, nothing is found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STANDSTILL = 60.0
"""Seconds after which a job is given up one of whose processes is stopped, or none of whose ranks does anything."""

STOPPED = "is stopped by a signal such as SIGSTOP"
REMEDY = "see who sent it, and run it again"

_PROC = Path("/proc")
_LOOKS = 12
"""Looks in the time after which a job counts as standing still."""
_LONGEST = 5.0
"""Seconds between two looks, at most."""
_SHARE = 0.02
"""Share of a processor that threads use which only wait."""


@dataclass
class Standstill:
    """Judge of a running job.

    Attributes:
        seconds: time after which a process counts as stopped, or the job as standing still.
        idle: True if processes may not wait for something else than one another.
        pause: time between two looks, s.
        due: time of the next look, on the clock of the machine, s.
    """

    seconds: float
    idle: bool = True
    pause: float = field(init=False)
    due: float = field(init=False)
    _last: float = field(init=False, default_factory=time.monotonic)
    _stopped: dict[int, float] = field(init=False, default_factory=dict)
    _still: float = field(init=False, default=0.0)
    _used: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.pause = min(self.seconds / _LOOKS, _LONGEST)
        self.due = self._last + self.pause

    def moved(self) -> None:
        """Note a report: the job does something."""
        self._still = 0.0

    def look(self, processes: Collection[int]) -> int | None:
        """Return the process that has been stopped for too long, 0 if all have stood still, None if neither."""
        now = time.monotonic()
        if now < self.due:
            return None
        passed = min(
            now - self._last, 2 * self.pause
        )  # less than what passed while this process was stopped itself
        self._last, self.due = now, now + self.pause
        for process in processes:
            self._stopped[process] = self._stopped.get(process, 0.0) + passed if halted(process) else 0.0
            if self._stopped[process] >= self.seconds:
                return process
        self._still = 0.0 if self._progress({*processes}, passed) else self._still + passed
        return 0 if self.idle and self._still >= self.seconds else None

    def _progress(self, processes: set[int], passed: float) -> bool:
        found = dict(_members(processes))
        before, self._used = self._used, sum(found.values())
        return (
            not found
            or not 0.0 <= self._used - before <= _SHARE * passed
            or any(state in "RD" for process in found for state in _states(process))
        )


def halted(process: int) -> bool:
    """Return True if a process is stopped."""
    return next(_states(process), "") == "T"


def _members(sessions: set[int]) -> Iterator[tuple[int, float]]:
    """Yield the processes of some sessions, with the processor time that each has used, s."""
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(folder / "stat")
        if fields and (int(folder.name) in sessions or int(fields[3]) in sessions):
            yield int(folder.name), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _states(process: int) -> Iterator[str]:
    """Yield the state of each thread of a process, the first one first."""
    for path in sorted(_PROC.glob(f"{process}/task/[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        yield from _fields(path)[:1]


def _fields(path: Path) -> list[str]:
    """Return the fields behind the name in a file of proc(5), from the state on; none if the process is gone."""
    with suppress(OSError):
        return path.read_text(errors="replace").rpartition(")")[2].split()
    return []
