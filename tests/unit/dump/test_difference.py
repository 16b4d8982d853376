"""Two dumps are the same only when every byte and every name is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.dump import Recorder, at, recording, tap
from regress.dump.bitwise_difference import compare_bitwise
from regress.errors import DumpError

NAN = float("nan")


def _dump(folder: Path, values: dict[str, Any], meta: dict[str, Any] | None = None, **place: Any) -> Path:
    with recording(Recorder(folder, options={"loss": True})):
        for step in range(2):
            with at(step=step, **place):
                tap("loss", meta=meta, **values)
    return folder


SIGN = r"x: 1 of 3 elements differ, by at most 0 \(largest value 1\)"
BASE = {"x": np.array([0.0, NAN, 1.0], np.float32), "y": np.arange(4)}


def test_equal_dumps(tmp_path: Path) -> None:
    meta = {"metrics": {"ratio": NAN, "loss": 0.1}}
    found = compare_bitwise(_dump(tmp_path / "a", BASE, meta), _dump(tmp_path / "b", BASE, meta))
    assert (found.records, found.tensors, found.differences) == (2, 4, [])


@pytest.mark.parametrize(
    ("values", "meta", "place", "what"),
    [
        (
            {**BASE, "x": np.array([-0.0, NAN, 1.0], np.float32)},
            {},
            {},
            SIGN,
        ),
        (
            {**BASE, "x": np.array([0.0, NAN, NAN], np.float32)},
            {},
            {},
            SIGN,
        ),
        ({**BASE, "y": np.arange(4, dtype=np.int32)}, {}, {}, r"y: int64\[4\] and int32\[4\]"),
        ({**BASE, "y": np.arange(4).reshape(2, 2)}, {}, {}, r"y: int64\[4\] and int64\[2, 2\]"),
        ({"x": BASE["x"]}, {}, {}, "y: only in the first dump"),
        (BASE, {"scale": 0.5}, {}, "metadata: scale"),
        (BASE, {}, {"epoch": 1}, "metadata: coordinates"),
    ],
)
def test_each_difference(tmp_path: Path, values: Any, meta: Any, place: Any, what: str) -> None:
    found = compare_bitwise(_dump(tmp_path / "a", BASE, {}), _dump(tmp_path / "b", values, meta, **place))
    assert [difference.file for difference in found.differences] == [
        *("loss/step_000000.safetensors", "loss/step_000001.safetensors")
    ]
    for difference in found.differences:
        assert re.fullmatch(what, difference.what)


def test_other_files(tmp_path: Path) -> None:
    first, second = _dump(tmp_path / "a", BASE), _dump(tmp_path / "b", BASE, rank=0)
    found = compare_bitwise(first, second)
    assert [difference.what for difference in found.differences] == [
        f"only in {side}" for side in (first, first, second, second)
    ]


def test_nothing_to_compare(tmp_path: Path) -> None:
    for name in "ab":
        with recording(Recorder(tmp_path / name, options={})):
            pass
    with pytest.raises(DumpError, match="nothing could be compared"):
        compare_bitwise(tmp_path / "a", tmp_path / "b")
