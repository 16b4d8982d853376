"""Recorded trajectories from a file, a folder, a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.dump import (
    DumpReader,
    Recorder,
    at,
    read,
    read_all,
    read_trajectories,
    recording,
    tap_trajectories,
)
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.errors import DumpError


@pytest.fixture
def dump(tmp_path: Path, make_trajectory: Any, format_name: str) -> Path:
    folder = tmp_path / "dump"
    with recording(Recorder(folder, options={"trajectory": True}, format=format_name)):
        for step in range(3):
            with at(step=step):
                tap_trajectories(
                    [make_trajectory(0), make_trajectory(1, tokens=[1, 2, 3, step])], meta={"k": step}
                )
                tap_trajectories([make_trajectory(0, is_val=True)], folder="val")
    return folder


def test_each_way_to_name_them(dump: Path, format_name: str) -> None:
    for path in (dump, dump / "trajectory"):
        steps = read_trajectories(path, format_name)
        assert list(steps) == [0, 1, 2]
        assert steps[2].trajectories[1].tokens == [1, 2, 3, 2]
        assert steps[2].path == dump / "trajectory" / f"step_000002.{format_name}"
        assert steps[2].meta == {"k": 2}
    assert [t.is_val for t in read_trajectories(dump / "val")[1].trajectories] == [True]
    assert list(read_trajectories(dump / "trajectory" / f"step_000001.{format_name}")) == [1]


def test_relative_paths(dump: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dump / "trajectory")
    assert list(read_trajectories(".")) == [0, 1, 2]
    assert list(read_trajectories(f"step_000002.{format_name}")) == [2]


def test_manifest_guards_even_a_single_file(dump: Path, format_name: str) -> None:
    first, second, _ = sorted((dump / "trajectory").iterdir())
    second.write_bytes(first.read_bytes())
    for path in (dump, dump / "trajectory", second):
        with pytest.raises(DumpError, match="do not match the size and hash"):
            read_trajectories(path)


def test_folder_without_manifest(dump: Path, tmp_path: Path, format_name: str) -> None:
    folder = (dump / "trajectory").rename(tmp_path / "elsewhere")
    assert list(read_trajectories(folder)) == [0, 1, 2]
    last = folder / f"step_000002.{format_name}"
    last.rename(folder / f"step_000009.{format_name}")
    with pytest.raises(DumpError, match=r"step_000009\.\w+ holds step 2: it was renamed"):
        read_trajectories(folder)


def test_wrong_format(dump: Path, format_name: str) -> None:
    other = "pt" if format_name != "pt" else "jsonl"
    with pytest.raises(DumpError, match=f"is a {format_name} dump, not {other}: set the format"):
        read_trajectories(dump, other)
    lone = dump.parent / f"lone.{format_name}"
    (dump / "trajectory" / f"step_000000.{format_name}").rename(lone)
    with pytest.raises(DumpError, match=f"is a {format_name} file, not {other}: set the format"):
        read_trajectories(lone, other)
    assert list(read_trajectories(lone, format_name)) == [0]
    with pytest.raises(DumpError, match="dump format 'csv' does not exist"):
        read_trajectories(lone, "csv")


def test_several_steps_in_one_file(tmp_path: Path, make_records: Any, write_record: Any) -> None:
    lines = b""
    for step in range(3):
        record = make_records()[0]
        record.step = step
        lines += write_record(tmp_path, record, "jsonl").read_bytes()
    path = tmp_path / "all.jsonl"
    path.write_bytes(lines)
    assert list(read_trajectories(path)) == [0, 1, 2]
    assert len(read_all(path)) == 3
    with pytest.raises(DumpError, match="holds 3 records, but one was asked for"):
        read(path)
    path.write_bytes(lines + lines[: lines.index(b"\n") + 1])
    with pytest.raises(DumpError, match="step 0 is recorded in both"):
        read_trajectories(path)
    path.write_bytes(lines.replace(b'"tokens":[5,', b'"tokens":[6,', 1))
    with pytest.raises(DumpError, match="line 1 of 3 is damaged: its text does not match its checksum"):
        read_trajectories(path)


def test_other_types(tmp_path: Path, make_records: Any, write_record: Any) -> None:
    path = write_record(tmp_path, make_records()[2], "pt")
    with pytest.raises(DumpError, match=r"\.pt holds loss, not trajectories"):
        read_trajectories(path)


def test_dump_without_trajectories(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options={"loss": True})) as recorder:
        recorder.put(Record.of("loss", Coordinates(0), {"loss": 1.0}))
    with pytest.raises(DumpError, match=r"holds no trajectories: record with dump_options\.trajectory=true"):
        read_trajectories(tmp_path)
    assert len(list(DumpReader(tmp_path))) == 1
    with pytest.raises(DumpError, match="does not exist: check the path"):
        read_trajectories(tmp_path / "nowhere.pt")
