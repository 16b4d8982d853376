"""trackio: every point is in its database, repeated ones told apart by their segment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress.engine.tracking.metrics_replay import replay
from tests.trackers.conftest import LOSSES, RATES, REWARDS

pytest.importorskip("trackio")


def rows_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("run")
    return list(SQLiteStorage.get_logs("run", run))


def last_of(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in sorted(rows, key=lambda row: row["sequence"]) if name in row}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trackio reads TRACKIO_DIR when it is imported."""
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.sqlite_storage, trackio.utils):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")


def test_no_point_is_lost_in_a_resume(
    interrupted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(interrupted("trackio"), monkeypatch)
    assert last_of(rows, "rollouts/returns_mean") == REWARDS
    assert last_of(rows, "training_step/loss") == LOSSES
    assert last_of(rows, "eval_avg_test_pass_rate") == RATES
    assert {row["segment"] for row in rows} == {0, 1}
    places = [row["sequence"] for row in rows]
    assert len(places) == len(set(places)), "no row is sent twice"


def test_the_record_replays(interrupted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted()
    replay(folder, "trackio", notice=pytest.fail, project="run")
    rows = rows_of(folder, monkeypatch)
    assert sorted(row["step"] for row in rows if "rollouts/returns_mean" in row) == list(range(200))
    assert last_of(rows, "training_step/loss") == LOSSES
