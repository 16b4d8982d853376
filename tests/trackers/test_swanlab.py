"""SwanLab, offline: every point is in the files of the run, which ``swanlab sync`` sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress.engine.tracking.metrics_replay import replay
from tests.trackers.conftest import LOSSES, RATES, REWARDS

pytest.importorskip("swanlab")


def records(folder: Path) -> list[list[dict[str, Any]]]:
    """The records of each file of the run, the oldest file first."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = []
    for path in sorted(folder.rglob("*.swanlab"), key=lambda path: path.stat().st_mtime_ns):
        reader, rows = DataStoreReader(), []
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            rows.append(MessageToDict(record))
        reader.close()
        found.append(rows)
    return found


def points(files: list[list[dict[str, Any]]], name: str) -> dict[int, float]:
    """The values of a metric by step, as the last file tells them."""
    scalars = [row["scalar"] for rows in files for row in rows if row.get("scalar", {}).get("key") == name]
    return {int(one.get("step", 0)): one["value"].get("number", 0.0) for one in scalars}


def test_no_point_is_lost_in_a_resume(interrupted: Callable[..., Path]) -> None:
    files = records(interrupted("swanlab"))
    assert len(files) == 2
    assert len({rows[0]["start"]["id"] for rows in files}) == 1, "the experiment goes on"
    assert points(files, "rollouts/returns_mean") == REWARDS
    assert points(files, "training_step/loss") == LOSSES
    assert points(files, "eval_avg_test_pass_rate") == RATES
    assert set(points(files[1:], "rollouts/returns_mean")) == set(range(100, 200))
    assert any("examples/completion" in str(row.get("media", "")) for rows in files for row in rows)


def test_the_record_replays(interrupted: Callable[..., Path]) -> None:
    folder = interrupted()
    replay(folder, "swanlab", notice=pytest.fail, project="run")
    files = records(folder)
    assert points(files, "rollouts/returns_mean") == REWARDS
    assert points(files, "training_step/loss") == LOSSES
