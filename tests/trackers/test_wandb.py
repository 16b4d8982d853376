"""wandb offline: every point is in the run's file, whatever was logged before the resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress.dump.metrics_file import read_metrics
from regress.engine.tracking.metrics_log import TrackedLog
from regress.engine.tracking.metrics_replay import replay
from regress.engine.tracking.run_identity import Wishes
from regress.engine.tracking.tracker_state import read_sync_state
from tests.trackers.conftest import LOSSES, RATES, REWARDS
from tests.trackers.wandb_file import axes_of, records_of, rows_of

pytest.importorskip("wandb")


def last_of(rows: list[dict[str, Any]], name: str, axis: str) -> dict[int, float]:
    """The value of the last segment at each point of an axis."""
    return {row[axis]: row[name] for row in rows if name in row}


def test_no_point_is_lost_in_a_resume(interrupted: Callable[..., Path]) -> None:
    """wandb drops a step below its own where it is given one, and an offset that moves loses the gap."""
    folder = interrupted("wandb")
    rows = rows_of(folder)
    assert last_of(rows, "rollouts/returns_mean", "step") == REWARDS
    assert last_of(rows, "training_step/loss", "update") == LOSSES
    assert last_of(rows, "eval_avg_test_pass_rate", "step") == RATES
    axes = axes_of(folder)
    assert (axes["rollouts/returns_mean"], axes["training_step/loss"]) == ("step", "update")
    places = [(row["segment"], row["sequence"]) for row in rows]
    assert len(places) == len(set(places)), "no row is sent twice"
    assert {row["segment"] for row in rows} == {0, 1}
    # offline-run-DATE-ID, and a number behind it for a second one within the same second
    ids = {path.name.split("-")[3] for path in folder.glob("wandb/offline-run-*")}
    state = read_sync_state(folder)
    assert state is not None
    assert ids == {state["run_id"]}, "a resume goes on in the same run"


def test_the_record_replays_into_a_run_of_its_own(interrupted: Callable[..., Path], tmp_path: Path) -> None:
    folder = interrupted()
    done = replay(folder, "wandb", notice=pytest.fail)
    assert (done.whole, done.sent) == (True, len(read_metrics(folder / "metrics.jsonl")))
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "rollouts/returns_mean" in row] == list(range(200))
    assert last_of(rows, "rollouts/returns_mean", "step") == REWARDS
    assert last_of(rows, "training_step/loss", "update") == LOSSES


@pytest.mark.parametrize(
    ("keys", "environ", "project", "place"),
    [
        ({}, {}, "run", "."),
        ({}, {"WANDB_PROJECT": "theirs", "WANDB_DIR": "theirs"}, "theirs", "theirs"),
        (
            {"project": "ours", "log_dir": "ours", "run_name": "name"},
            {"WANDB_PROJECT": "theirs", "WANDB_DIR": "theirs"},
            "ours",
            "ours",
        ),
    ],
)
def test_keys_beat_the_environment_which_beats_the_defaults(
    keys: dict[str, str],
    environ: dict[str, str],
    project: str,
    place: str,
    offline: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_DIR", "log_dir"):
        for given in (environ, keys):
            if name in given:
                given[name] = str(tmp_path / given[name])
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    wishes = Wishes(name="run", output_dir=tmp_path, **keys)  # type: ignore[arg-type]
    with TrackedLog(wishes, ["wandb"], warn=pytest.fail, finish_timeout=60.0) as log:
        log.log({"a": 1.0}, step=0)
    (run,) = (
        record.run for record in records_of(tmp_path / place) if record.WhichOneof("record_type") == "run"
    )
    assert run.project == project
    assert (run.display_name, run.run_id) == (keys.get("run_name", "run"), log.status()["run_id"])
