"""Check what `regress replay` prints of replays that fail: one entry for those that broke alike."""

from __future__ import annotations

import re
import subprocess
import sys
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


@pytest.mark.extended
def test_processes_that_share_the_replays_say_the_same() -> None:
    """In a process of its own: one that has loaded torch is not forked."""
    command = [sys.executable, "-m", "regress", "replay", "dr_grpo", "on_policy", "--variants", "base,mbs4"]
    told = [
        subprocess.run(
            [*command, "--golden-dir", str(GOLDEN), *jobs], capture_output=True, text=True, timeout=280
        )
        for jobs in ((), ("--jobs", "2"))
    ]
    assert [done.returncode for done in told] == [0, 0], told[1].stderr
    assert told[0].stdout == told[1].stdout
    assert "4 replays, " in told[1].stdout


def test_a_launcher_has_one_replay_at_a_time() -> None:
    refused = CliRunner().invoke(main, ["replay", "dr_grpo", "--jobs", "2", "--launcher", "torchrun"])
    assert refused.exit_code == 2
    assert "error: --launcher torchrun runs one replay at a time; leave --jobs away" in refused.output
