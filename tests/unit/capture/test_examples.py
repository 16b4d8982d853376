"""The examples run as they are printed, and the layouts that they compare are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from capture_loops import compare, failed

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*arguments: str | Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_loop(tmp_path: Path) -> None:
    run(EXAMPLES / "plain_loop.py", tmp_path / "a", tmp_path / "b")
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


@pytest.mark.extended
def test_fsdp2(tmp_path: Path) -> None:
    run(EXAMPLES / "fsdp2.py", tmp_path / "a")
    run("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "fsdp2.py", tmp_path / "b")
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)


@pytest.mark.parametrize("name", ["plain_loop.py", "fsdp2.py", "trl_grpo.py"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 40
