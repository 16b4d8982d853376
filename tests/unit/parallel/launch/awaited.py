"""Processes and files that tests wait for."""

from __future__ import annotations

import time
from pathlib import Path

GUARD = 200.0
"""Seconds after which something hangs; nothing here depends on how long it takes."""


def gone(process: int) -> bool:
    """Return True if a process has ended, or ends within the time allowed."""
    end = time.monotonic() + GUARD
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def appears(path: Path) -> bool:
    """Wait for a file with content."""
    end = time.monotonic() + GUARD
    while time.monotonic() < end:
        if path.is_file() and path.read_text():
            return True
        time.sleep(0.05)
    return False
