"""The system of the how-to: it is short, it runs on two ranks, and what is wrong or not engaged is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def code() -> str:
    text = (ROOT / "docs/howto/your-system.md").read_text()
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


def run(folder: Path, source: str) -> tuple[int, str]:
    (folder / "my_system.py").write_text(source)
    command = [sys.executable, "-m", "regress", "systems", "run", "my_system:Mine"]
    command += ["--golden-dir", str(ROOT / "golden")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def test_it_is_short() -> None:
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


def test_it_is_exact(tmp_path: Path) -> None:
    code_, told = run(tmp_path, code())
    assert code_ == 0, told
    assert "fsdp2/sft/dense: exact" in told


@pytest.mark.extended
def test_a_factor_of_the_ranks_is_wrong(tmp_path: Path) -> None:
    found, told = run(tmp_path, code().replace("(2 * out.loss)", "(out.loss)"))
    assert found == 1
    assert "wrong: drift: loss" in told


@pytest.mark.extended
def test_a_layout_that_is_off_is_no_green_row(tmp_path: Path) -> None:
    found, told = run(tmp_path, code().replace("fully_shard(part)", "pass").replace("2 * ", ""))
    assert found == 2
    assert "the layout is not on: nothing is sharded" in told
