"""The token gradient of a recorded loop: exact factors on named tokens, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_loops import make_samples, recorded

from regress.dump.dump_reader import DumpReader
from regress.dump.record import Record

TOTAL = sum(len(sample) - 1 for sample in make_samples())


def shares(folder: Path) -> list[Record]:
    reader = DumpReader(folder)
    return [reader.read(name) for name in reader.names() if name.startswith("token_gradient/")]


@pytest.mark.parametrize(("layout", "accumulation"), [("right", 1), ("packed", 2), ("left", 4)])
def test_the_share_of_each_token_is_its_weight_over_all_tokens(
    tmp_path: Path, layout: str, accumulation: int
) -> None:
    recorded(
        tmp_path / "a", layout=layout, accumulation=accumulation, updates=1, options={"token_gradient": True}
    )
    found = shares(tmp_path / "a")
    assert len(found) == accumulation
    tokens = 0
    for record in found:
        reader = DumpReader(tmp_path / "a")
        ids = reader.read(f"batch_inputs/step_000000_rank0_micro{record.micro}.safetensors").tensors[
            "input_ids"
        ]
        layout_found: Any = record.meta["layout"]
        for _, start, stop, row, col in layout_found["segments"]:
            here = np.s_[row, col : col + stop - start]
            assert start == 1
            np.testing.assert_allclose(
                record.tensors["token_gradient"][here], -(1 + ids[here] % 3) / TOTAL, rtol=1e-5
            )
            assert np.abs(record.tensors["entropy_gradient"][here]).max() < 1e-6
            assert record.tensors["token_residual"][here].max() < 1e-6
            assert record.tensors["recoverable"][here].all()
            tokens += stop - start
    assert tokens == TOTAL
