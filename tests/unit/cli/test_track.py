"""``regress track replay``: what a tracker lacks, or the whole run, sent later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from click.testing import CliRunner, Result

from regress.cli import main
from regress.engine.tracking.metrics_log import TrackedLog
from regress.engine.tracking.run_identity import Wishes
from regress.engine.tracking.tracker_backup import Backup


class Shaky(GeneralTracker):
    """Fails at the rows that it is told to."""

    name = "shaky"
    requires_logging_directory = False
    rows: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []
    projects: ClassVar[list[str]] = []
    bad: ClassVar[set[float]] = set()

    def __init__(self, project: str) -> None:
        super().__init__()
        self.projects.append(project)

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if values["a"] in self.bad:
            raise ConnectionError("gone")
        self.rows.append((step, values))


@pytest.fixture
def shaky(monkeypatch: pytest.MonkeyPatch) -> type[Shaky]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "shaky", Shaky)
    for store in (Shaky.rows, Shaky.projects, Shaky.bad):
        store.clear()
    return Shaky


def run_of(
    folder: Path, *trackers: str, start: int = 0, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Log steps up to 4, and return the state of a checkpoint after step 2."""
    wishes = Wishes(name="run", output_dir=folder, project="project")
    with TrackedLog(wishes, trackers, warn=lambda text: None) as log:
        if state is not None:
            log.load_state_dict(state)
            log.resumed("checkpoint", step=start, update=start)
        for step in range(start, 5):
            log.log({"a": step + (0.5 if start else 0)}, step=step)
            if step == 2:
                saved = log.state_dict()
    return state or saved


def replay(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["track", "replay", str(folder), "--to", "shaky", *options])


def test_what_a_tracker_missed_is_sent_once(tmp_path: Path, shaky: type[Shaky]) -> None:
    shaky.bad |= {1, 3}
    run_of(tmp_path, "shaky")
    assert [row["a"] for _, row in shaky.rows] == [0, 2, 4]
    assert sorted(path.name for path in (tmp_path / "wandb_backup").iterdir()) == [
        "step_000001.json",
        "step_000003.json",
    ]
    shaky.bad.clear()
    done = replay(tmp_path)
    assert done.exit_code == 0, done.output
    assert "2 rows that it lacked sent" in done.output
    assert shaky.rows[3:] == [(1, {"a": 1}), (3, {"a": 3})]
    assert not Backup(tmp_path).rows("shaky")
    assert "0 rows" in replay(tmp_path).output
    assert shaky.projects == ["project", "project"]


def test_what_fails_again_stays_in_the_backup(tmp_path: Path, shaky: type[Shaky]) -> None:
    shaky.bad |= {1, 3}
    run_of(tmp_path, "shaky")
    shaky.bad.remove(1)
    failed = replay(tmp_path)
    assert failed.exit_code == 1
    assert "shaky took 1 of 2 rows (ConnectionError: gone); mend it and send again" in failed.output
    assert [row["a"] for row in Backup(tmp_path).rows("shaky")] == [3]


def test_the_whole_run_is_sent_as_if_nothing_had_interrupted_it(tmp_path: Path, shaky: type[Shaky]) -> None:
    state = run_of(tmp_path)
    run_of(tmp_path, start=3, state=state)
    done = replay(tmp_path)
    assert done.exit_code == 0, done.output
    assert "5 rows of the whole run sent" in done.output
    assert shaky.rows == [(step, {"a": value}) for step, value in enumerate([0, 1, 2, 3.5, 4.5])]


def test_rows_that_were_made_again_are_not_sent_from_the_backup(tmp_path: Path, shaky: type[Shaky]) -> None:
    shaky.bad |= {3, 3.5}
    state = run_of(tmp_path, "shaky")
    run_of(tmp_path, "shaky", start=3, state=state)
    shaky.bad.clear()
    shaky.rows.clear()
    assert replay(tmp_path).exit_code == 0
    assert shaky.rows == [(3, {"a": 3.5})]


def test_what_is_missing_of_a_run_without_the_tracker_is_unknown(tmp_path: Path, shaky: type[Shaky]) -> None:
    run_of(tmp_path)
    refused = replay(tmp_path, "--missing")
    assert refused.exit_code == 2
    assert "shaky took no part in the run" in refused.output
    assert "give --all" in refused.output


def test_a_folder_without_metrics_is_named(tmp_path: Path, shaky: type[Shaky]) -> None:
    refused = replay(tmp_path)
    assert refused.exit_code == 2
    assert "metrics.jsonl cannot be read" in refused.output


def test_an_unknown_tracker_is_answered_with_the_nearest(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["track", "replay", str(tmp_path), "--to", "wandbb"])
    assert refused.exit_code == 2
    assert "did you mean wandb" in refused.output
