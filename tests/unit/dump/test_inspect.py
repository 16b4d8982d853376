"""Rows and tables of a dump."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from regress.dump import Recorder, at, read, recording, tap, tap_trajectories
from regress.dump.coordinates import Coordinates
from regress.dump.dump_inspection import directory_rows, render, spans, tensor_rows
from regress.dump.dump_manifest import MANIFEST
from regress.dump.record import Record
from regress.errors import DumpError


def _shown(path: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(path))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def dump(tmp_path: Path, make_trajectory: Any) -> Path:
    with recording(Recorder(tmp_path, options={"loss": True, "trajectory": True})):
        for step in (0, 1, 2, 5):
            with at(step=step):
                tap_trajectories(
                    [make_trajectory(i, response="\x1b[31mred") for i in range(60)], meta={"mode": "train"}
                )
                for micro in range(2):
                    with at(rank=0, micro=micro):
                        tap("loss", loss=0.5, x=np.array([np.nan, 1.0, np.inf, -3.0]), meta={"tokens": 7})
    return tmp_path


def test_directory(dump: Path) -> None:
    rows = directory_rows(dump)
    assert [row["type"] for row in rows] == ["trajectory", "loss"]
    assert {key: rows[1][key] for key in ("steps", "ranks", "micros", "files")} == {
        "steps": "0-2 5",
        "ranks": "0",
        "micros": "0-1",
        "files": 8,
    }
    assert rows[1]["bytes"] == sum(path.stat().st_size for path in (dump / "loss").iterdir())
    text = _shown(dump)
    assert "complete: 12 safetensors files" in text
    assert "numpy" in text
    assert "complete: 8 safetensors files" in _shown(dump / "loss")
    (dump / MANIFEST).unlink()
    assert "not verified" in _shown(dump)


def test_tensors(dump: Path) -> None:
    row = tensor_rows(read(dump / "loss" / "step_000000_rank0_micro0.safetensors"))[1]
    assert row == {
        "tensor": "x",
        "dtype": "float64",
        "shape": [4],
        "min": -3.0,
        "max": 1.0,
        "mean": -1.0,
        "norm": pytest.approx(10**0.5),
        "nan": 1,
        "inf": 1,
    }
    text = _shown(dump / "loss" / "step_000000_rank0_micro0.safetensors")
    assert "loss: step 0 rank 0 micro 0" in text
    assert "tokens: 7" in text


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3), np.int64), np.array([True, False]), np.array(np.nan), np.uint64(2**63)]
)
def test_statistics_of_anything(array: Any) -> None:
    (row,) = tensor_rows(Record.of("activations", Coordinates(0), {"x": array}))
    assert row["nan"] == int(np.isnan(array).sum())
    assert row["max"] == (array.max() if array.size and not row["nan"] else None)


@pytest.mark.parametrize("format", ["safetensors", "pt", "jsonl"])
def test_broken_parameters_are_recorded_and_shown_without_warnings(
    tmp_path: Path, write_record: Any, format: str
) -> None:
    signaling = np.array([0x7F800001], np.uint32).view(np.float32)  # a NaN that raises the processor's flag
    for array in (signaling, np.array([1e308, -1e308, 1e308]), np.array([np.inf, -np.inf, np.nan])):
        path = write_record(tmp_path, Record.of("param", Coordinates(0), {"w": array}), format)
        assert np.array_equal(read(path).tensors["w"], array, equal_nan=True)
        assert "param: step 0" in _shown(path)


def test_samples(dump: Path) -> None:
    text = _shown(dump / "trajectory" / "step_000000.safetensors")
    assert "... and 10 more samples" in text
    assert "mode: train" in text
    assert "g0" in text
    assert "\x1b" not in text
    assert "red" in text


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="holds no dump: give a dump directory"):
        render(tmp_path)
    with pytest.raises(DumpError, match="does not exist"):
        render(tmp_path / "x.pt")


def test_spans() -> None:
    assert spans([3, 1, 2, 2, 9, 7]) == "1-3 7 9"
    assert spans([]) == ""
