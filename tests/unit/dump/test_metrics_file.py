"""Metrics survive kills and resumes: the read view shows each step and update once, as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.dump.metrics_file import MetricsWriter, metrics_of, read_metrics, read_rows, valid_rows
from regress.errors import DumpError, RegressError

UPDATES = 2
"""Optimizer updates in a rollout step."""


@dataclass
class Checkpoint:
    """Position of a run, and the number of the last row that was written before it."""

    step: int = 0
    update: int = 0
    sequence: int = -1
    segment: int = -1


@dataclass
class Trainer:
    """Logs as the training loop does, checkpoints after any update, and can be killed anywhere."""

    path: Path
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint()])

    def run(self, start: Checkpoint, rows: int | None, tear: int) -> None:
        """Go on from a checkpoint until so many rows are written, then lose the last bytes of the file."""
        name = None if start.sequence < 0 else f"checkpoint-{start.step}-update{start.update}"
        writer = MetricsWriter(
            self.path,
            resumed_from=name,
            step=start.step,
            update=start.update,
            after=start.sequence,
            segment=start.segment + 1,
        )
        for left, (step, update, metrics) in enumerate(self.rows_from(start)):
            if rows is not None and left >= rows:
                break
            writer.write(metrics, step=step, update=update)
            if update is not None:
                self.checkpoints.append(Checkpoint(step, update + 1, writer.sequence, writer.segment))
        writer.close()
        if tear and rows is not None and self.path.exists():
            data = self.path.read_bytes()
            end = max(data.rfind(b"\n", 0, len(data) - 1) + 1, len(data) - tear)
            self.path.write_bytes(data[:end])
            # what the torn row told is lost, and so is a checkpoint that was written after it
            last = max((row["sequence"] for row in read_rows(self.path, lambda _: None)), default=-1)
            self.checkpoints = [one for one in self.checkpoints if one.sequence <= last]

    def rows_from(self, start: Checkpoint) -> list[tuple[int, int | None, dict[str, float]]]:
        rows: list[tuple[int, int | None, dict[str, float]]] = []
        for step in range(5):
            rows.append((step, None, {"rollouts/returns_mean": step / 3}))
            rows += [
                (step, update, {"training_step/loss": update / 7})
                for update in range(step * UPDATES, (step + 1) * UPDATES)
            ]
            rows.append((step, None, {"training_epoch/loss_mean": -step / 3}))
        if start.sequence < 0:
            return rows
        done = next(index for index, row in enumerate(rows) if row[1] == start.update - 1)
        return rows[done + 1 :]


def view(path: Path) -> list[tuple[int, int | None, dict[str, Any]]]:
    rows = read_metrics(path, lambda _: None)
    return [(row["step"], row.get("update"), metrics_of(row)) for row in rows]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_kills_and_resumes_read_as_the_uninterrupted_run(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    calm, shaken = Trainer(folder / "calm.jsonl"), Trainer(folder / "shaken.jsonl")
    calm.run(Checkpoint(), None, 0)
    kills = data.draw(
        st.lists(st.tuples(st.integers(0, 25), st.integers(0, 200)), max_size=5), "rows, bytes torn"
    )
    for rows, tear in kills:
        shaken.run(data.draw(st.sampled_from(shaken.checkpoints), "from"), rows, tear)
    shaken.run(data.draw(st.sampled_from(shaken.checkpoints), "from"), None, 0)
    assert view(shaken.path) == view(calm.path)
    places = [(step, update) for step, update, _ in view(shaken.path)]
    assert len(places) == len(set(places))
    sequences = [row["sequence"] for row in read_rows(shaken.path)]
    assert sequences == list(range(len(sequences)))


def test_a_resume_hides_what_is_made_again_and_nothing_else(tmp_path: Path) -> None:
    """The last segment wins also where it says less: a step that it has not reached again is not there."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path)
    first.write({"a": 0.0}, step=0)
    first.write({"eval": 0.5}, step=1)
    known = first.sequence
    first.write({"a": 1.0}, step=1)
    first.write({"a": 2.0}, step=2)
    first.close()
    second = MetricsWriter(path, resumed_from="checkpoint-1", step=1, update=1, after=known)
    second.write({"a": 1.5}, step=1)
    second.close()
    assert view(path) == [(0, None, {"a": 0.0}), (1, None, {"eval": 0.5, "a": 1.5})]
    assert [row["segment"] for row in valid_rows(read_rows(path))] == [0, 0, 1]


def test_a_run_that_starts_anew_in_the_same_directory_shows_nothing_of_the_earlier_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    for value in (1.0, 2.0):
        writer = MetricsWriter(path)
        writer.write({f"only/{value}": value}, step=0)
        writer.close()
    assert view(path) == [(0, None, {"only/2.0": 2.0})]
    assert len(read_rows(path)) == 3


def test_a_torn_last_line_is_dropped_with_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1.0}\n{"step": 1, "a": 2')
    told: list[str] = []
    assert [row["step"] for row in read_metrics(path, told.append)] == [0]
    (sentence,) = told
    assert "its last line is torn (18 bytes)" in sentence
    with pytest.warns(RuntimeWarning, match="is torn"):
        read_metrics(path)


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1.0}')
    writer = MetricsWriter(path, resumed_from="checkpoint-1", step=1, after=0)
    writer.write({"a": 2.0}, step=1)
    writer.close()
    assert view(path) == [(0, None, {"a": 1.0}), (1, None, {"a": 2.0})]


def test_a_damaged_line_in_the_middle_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(DumpError, match="line 2 is not a row of metrics"):
        read_metrics(path)
    with pytest.raises(DumpError, match="line 2"):
        MetricsWriter(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"metrics\.jsonl cannot be read"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_rows_of_an_older_release_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n')
    assert view(path) == [(0, None, {"a": 1.0}), (1, None, {"a": 2.0})]


def test_nothing_is_touched_before_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).close()
    assert not path.exists()
    path.write_bytes(b'{"step": 0, "a": 1.0}\n{"torn')
    MetricsWriter(path).close()
    assert path.read_bytes().endswith(b'{"torn')


def test_what_is_not_finite_is_null_in_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"a": float("nan"), "b": float("inf"), "c": 0.1, "d": "text", "e": 3}, step=0)
    writer.close()
    (line,) = path.read_text().splitlines()
    assert metrics_of(json.loads(line)) == {"a": None, "b": None, "c": 0.1, "d": "text", "e": 3}


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [({"step": 1.0}, "cannot have the name 'step'"), ({"a": [1]}, "the metric 'a' is a list")],
)
def test_what_is_no_metric_is_refused_before_anything_is_written(
    tmp_path: Path, metrics: dict[str, Any], sentence: str
) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(RegressError, match=sentence):
        writer.write(metrics, step=0)
    assert not (tmp_path / "metrics.jsonl").exists()
