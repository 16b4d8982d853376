"""Jobs that ranks import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from regress.errors import ReplayError


def square(job: int, folder: Path, tick: Callable[[], None]) -> tuple[int, int, bool]:
    """Return the square, the process, and whether a launcher seems to have started it."""
    (folder / "mine").touch()
    tick()
    tick()
    meeting = folder.parent / "others"
    deadline = time.monotonic() + 60
    while not job and not meeting.exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # so that another process takes the next job
    if job == 1:
        meeting.touch()
    return job * job, os.getpid(), "WORLD_SIZE" in os.environ


def refused(job: int, folder: Path, tick: Callable[[], None]) -> int:
    if job in (1, 2):
        raise ReplayError(f"job {job} is refused; ask for another")
    return job
