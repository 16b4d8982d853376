"""A comparison in a notebook: a frame of its verdicts, and what it shows of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from safetensors.numpy import save_file

import regress


def folder(path: Path, by: float = 0.0) -> Path:
    path.mkdir()
    weights = {f"layer{n}.weight": np.full((2, 3), n + by * (n == 1), np.float32) for n in range(3)}
    save_file(weights, path / "model.safetensors")
    return path


def test_a_comparison_is_a_frame_of_its_verdicts(tmp_path: Path) -> None:
    found = regress.compare_sources(folder(tmp_path / "a"), folder(tmp_path / "b", 1.0))
    frame = found.to_pandas()
    assert len(frame) == len(found.verdicts) == 3
    bad = frame[frame.status != "ok"]
    assert bad.name.tolist() == ["layer1.weight"]
    assert bad.max_error.tolist() == [1.0]


@pytest.mark.extended
def test_the_frame_of_a_comparison_is_kept_as_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = regress.compare_sources(folder(tmp_path / "a"), folder(tmp_path / "b", 1.0)).to_pandas()
    frame.to_parquet(tmp_path / "verdicts.parquet")
    again = pandas.read_parquet(tmp_path / "verdicts.parquet")
    assert again.max_error.tolist() == frame.max_error.tolist()
    assert again.name.tolist() == frame.name.tolist()


def test_a_notebook_shows_what_differs_and_nothing_of_it_as_markup(tmp_path: Path) -> None:
    found = regress.compare_sources(folder(tmp_path / "a"), folder(tmp_path / "<b>", 1.0))
    page = found._repr_html_()
    assert "1 of 3 verdicts are not ok" in page
    assert "layer1.weight" in page
    assert "layer2.weight" not in page
    assert "<b>" not in page
    equal = regress.compare_sources(tmp_path / "a", tmp_path / "a")._repr_html_()
    assert "equal within tolerance" in equal
    assert "<table" not in equal
