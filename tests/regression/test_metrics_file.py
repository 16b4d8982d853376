"""File of metrics that the program writes: it says what the steps reported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from regress.dump.metrics_file import METRICS
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.metrics_judge import judge_metrics_file
from regress.replay.replay_judge import records_of
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("training_step/kl", True),
        ("rollouts/returns_std", False),
        ("rollouts/total_rollouts", False),
        ("final/total_batches", False),
    ],
)
def test_a_file_of_metrics_that_holds_another_number_is_named(
    tmp_path: Path, name: str, update: bool
) -> None:
    """Compare the file that the program writes with the reports of its steps."""
    chosen = Replay(GoldenStore(GOLDEN).case("dense"), VARIANTS["tracking-on"], Precision.BITWISE)
    dump = replay(chosen.case, chosen.variant, chosen.precision, tmp_path)
    records = partial(records_of, dump)
    assert all(verdict.ok and verdict.count for verdict in judge_metrics_file(dump, chosen.plan, records))
    path = tmp_path / METRICS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in reversed(rows) if name in row and ("update" in row) == update)
    row[name] += 1e-9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = [verdict for verdict in judge_metrics_file(dump, chosen.plan, records) if not verdict.ok]
    assert len(failed) == 1
    assert name in failed[0].detail
