"""What `regress replay` prints of replays that fail: one entry for those that broke alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main

GOLDEN = Path(__file__).parents[3] / "golden"


def test_replays_that_broke_alike_are_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    wrong = ("--variants", "base,pad8", "--set", "algorithm.entropy_coef=0.02")
    result = CliRunner().invoke(main, ["replay", "dr_grpo", *wrong, "--golden-dir", str(GOLDEN)])
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    (extent,) = [line for line in lines if "checks at it" in line and line.startswith("  ")]
    assert re.fullmatch(r"  \d+ failed checks at it and after it in dr_grpo/\w+, dr_grpo/\w+", extent)
    assert sum(line.startswith("  probably: ") for line in lines) == 1
    (shown,) = [line for line in lines if line.startswith("::error ")]
    assert shown.startswith(f"::error file={GOLDEN / 'dr_grpo' / 'case.yaml'},line=1,title=drift%3A ")
