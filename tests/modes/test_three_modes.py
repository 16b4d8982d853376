"""``regress compare`` of the three modes of a training: equal, and every planted discrepancy named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from regress.cli import main


def compared(modes: Any, *more: object) -> Result:
    modes.write()
    directories = {
        "--self_hosted_dir": modes.self_hosted,
        "--remote_api_dir": modes.client,
        "--weaver_dir": modes.service,
    }
    arguments = [str(word) for pair in directories.items() for word in pair]
    return CliRunner().invoke(main, ["compare", *arguments, *map(str, more)], catch_exceptions=False)


def test_three_healthy_modes_are_equal(modes: Any, tmp_path: Path) -> None:
    done = compared(modes, "--output", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 0
