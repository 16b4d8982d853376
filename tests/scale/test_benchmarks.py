"""Benchmarks on a small scale: what they use of the package and of these tests is still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import collection

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["integrity", "scale"])
def test_a_benchmark_of_dumps_runs(name: str, tmp_path: Path) -> None:
    """`scale` asked the dumps for an argument that had gone, and nothing said so."""
    environ = {**os.environ, "REGRESS_BENCH_GB": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", name]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == name


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", collection.COMMANDS)
def test_commands_that_are_timed_find_their_tests(name: str) -> None:
    """The id of a golden test had changed, and the benchmark still asked for the old one."""
    collection.sides()[name]()
