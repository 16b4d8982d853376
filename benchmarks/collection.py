"""Everyday commands of pytest in this repository, against a process that imports torch and transformers.

Timed: whole processes, from their start to their end, with compiled bytecode on disk as a second run has it (also where
PYTHONDONTWRITEBYTECODE is set). `single id` runs one golden test, `-k` collects all tests and runs some fifty golden
tests, `--collect-only` only enumerates everything. Each must end without a failure, and have run or found as many tests
as it says.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report
from benchmarks.timing import Seconds, Side, alternate

ROUNDS = 3
ROOT = Path(__file__).parents[1]
IMPORTS = "imports"
BASE = "import torch, transformers"
EXPRESSION = "packed and micro1 and log_probs"
TEST = "tests/regression/test_golden.py::test_golden[dense/base/rank0/micro0]"
COMMANDS = {
    "single id": ((TEST,), 1, 1.75),
    f"-k {EXPRESSION!r}": (("-k", EXPRESSION), 50, 5.2),
    "--collect-only": (("--collect-only",), 8_000, 3.5),
}
"""Arguments, minimum number of tests, and goal: 5, 15 and 10 seconds where the imports take 2.9."""

_COUNT = re.compile(r"^(\d+)(?:/\d+)? (?:passed|tests? collected)", re.MULTILINE)


def run() -> Report:
    """Time the commands, over the imports."""
    report = Report("collection", "pytest in this repository, over importing torch and transformers")
    timed = sides()
    for side in timed.values():
        side()  # writes the bytecode
    measured = alternate(timed, ROUNDS)
    report.add_times(measured, IMPORTS)
    for name, (_, _, goal) in COMMANDS.items():
        report.goals[f"{name} over {IMPORTS}"] = (measured.ratio(name, IMPORTS), goal)
    return report


def sides() -> dict[str, Side]:
    """Return the commands and the imports, by name."""
    found = {IMPORTS: _side([sys.executable, "-c", BASE], 0)}
    for name, (arguments, count, _) in COMMANDS.items():
        found[name] = _side([sys.executable, "-m", "pytest", "-q", *arguments], count)
    return found


def _side(command: Sequence[str], count: int) -> Side:
    """Return a side that runs a process which must find so many tests; its processor time includes that of
    its children.
    """

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def side() -> Seconds:
        start = _now()
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        taken = _now() - start
        found = _COUNT.search(ended.stdout)
        if ended.returncode or (count and (found is None or int(found[1]) < count)):
            raise AssertionError(
                f"{' '.join(command)} did not do what is timed: {ended.stdout[-500:]}{ended.stderr[-500:]}"
            )
        return taken

    return side


def _now() -> Seconds:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(time.perf_counter(), used.ru_utime + used.ru_stime)
