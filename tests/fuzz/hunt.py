"""Search for inputs that a reader does not take as it should: processes that read, watched from outside.

A process that stands still for `PATIENCE` seconds hangs: it is killed, the input is a finding, and another process goes
on behind it. Standing still is measured by the processor time that it has used, as the machine may be busy.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 20.0
"""Seconds of processor time for one input, or ten times as many by the clock."""
MEMORY = 300 << 20
"""Bytes beyond those that the input as it was takes."""


@dataclass
class Hunt:
    """Result of a search.

    Attributes:
        read: number of inputs.
        refused: number of those that were refused with a sentence.
        findings: inputs that raised, hung or took too much memory, each with its number.
        memory: most bytes beyond those that the input as it was takes.
    """

    read: int = 0
    refused: int = 0
    memory: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        """Add what an input came to."""
        self.read += found["number"] >= 0
        self.refused += found.get("refused") is not None
        self.memory = max(self.memory, found["memory"])
        if found["memory"] > MEMORY:
            found.setdefault("defect", f"{found['memory'] >> 20} MiB more than the input as it was")
        if "defect" in found:
            self.findings.append(found)


def hunt(first: int, count: int, kinds: tuple[str, ...] = (), patience: float = PATIENCE) -> Hunt:
    """Read the inputs from ``first`` to ``count``, in one process at a time."""
    found = Hunt()
    while first is not None and first < count:
        first = _until_it_hangs(first, count, kinds, found, patience)  # type: ignore[assignment]  # None: it did not
    return found


def _until_it_hangs(
    first: int, count: int, kinds: tuple[str, ...], found: Hunt, patience: float
) -> int | None:
    """Read inputs in a new process; return the number to go on with behind the one that hangs."""
    command = [sys.executable, "-m", "tests.fuzz.child", str(first), str(count), "1", *kinds]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    started: dict[str, Any] | None = None
    since, rest = _clocks(child.pid), b""
    waiting = selectors.DefaultSelector()
    waiting.register(child.stdout, selectors.EVENT_READ)
    while True:
        if waiting.select(timeout=1.0):
            data = os.read(
                child.stdout.fileno(), 1 << 16
            )  # a buffered reader would keep lines that nobody waits for
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            since = _clocks(child.pid)
            for told in map(json.loads, lines):
                started = told if "start" in told else None
                if started is None:
                    found.add(told)
        elif started is not None and _stands_still(child.pid, since, patience):
            child.send_signal(signal.SIGUSR1)
            assert child.stderr is not None
            select.select([child.stderr], [], [], 20.0)  # in which it writes where it stands
            time.sleep(0.5)
            child.kill()
            where = child.communicate()[1].decode().rpartition("most recent call first")[2][:2000]
            found.add(
                {"number": started["start"], **started, "memory": 0, "defect": "it hangs", "traceback": where}
            )
            return int(started["start"]) + 1
    _, errors = child.communicate()
    if child.returncode or started is not None:
        number = -1 if started is None else int(started["start"])
        text = errors.decode()[-2000:]
        found.add(
            {
                "number": number,
                **(started or {}),
                "memory": 0,
                "defect": "the process died",
                "traceback": text,
            }
        )
        return None if started is None else number + 1
    return None


def _clocks(pid: int) -> tuple[float, float]:
    """Return the processor time of a process, and the time, in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def _stands_still(pid: int, since: tuple[float, float], patience: float) -> bool:
    used, now = _clocks(pid)
    return used - since[0] > patience or now - since[1] > 10 * patience
