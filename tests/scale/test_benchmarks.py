"""Benchmarks of dumps run on a small scale: what they use of the comparison and of these tests is still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
