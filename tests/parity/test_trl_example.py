"""The example of TRL's GRPOTrainer under test: one microbatch and four are the same training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from regress import compare_sources, explain_dump

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"


def test_the_example(tmp_path: Path) -> None:
    for micros in ("1", "4"):
        subprocess.run([sys.executable, EXAMPLE, tmp_path / micros, micros], check=True, timeout=280)
    found = compare_sources(str(tmp_path / "1"), str(tmp_path / "4"))
    assert found.exit_code == 0, [verdict.detail for verdict in found.failed]
    assert {"log_probs", "token_gradient", "gradient", "param"} <= {one.quantity for one in found.verdicts}
    assert not explain_dump(str(tmp_path / "4")).departures
