"""The distance of weights that rounding moved: of all elements, or of some that stand for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps import weight_drift
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.weight_drift import weight_distances
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.recorder import Recorder
from regress.layout import ShardLayout

SHAPES = {"embed.weight": (4000, 64), "head.weight": (64, 4000), "head.bias": (4000,)}


def dump(folder: Path, moved: dict[str, int]) -> Path:
    """Record two updates of seeded float32 weights, of which every n-th column was moved by one unit of rounding."""
    random, options = np.random.default_rng(3), {"param": True}
    tensors: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        values = random.normal(size=shape).astype(np.float32)
        if name in moved:
            values[..., :: moved[name]] = np.nextafter(values[..., :: moved[name]], np.float32(9))
        tensors[name] = values
    shards = {name: ShardLayout.whole(shape).to_json() for name, shape in SHAPES.items()}
    recorder = Recorder(folder, options=options)
    for update in range(2):
        recorder.put(Record.of("param", Coordinates(0, update=update, rank=0), tensors, {"shards": shards}))
    recorder.close()
    return folder


@pytest.mark.parametrize("every", [1, 2, 16])
def test_elements_at_even_distances_stand_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Steps of a power of two would meet the same columns of every row: all that moved, or none."""
    paths = dump(tmp_path / "golden", {}), dump(tmp_path / "actual", {"head.weight": every})
    found = []
    for most in (1 << 20, 32250):  # one of 16
        monkeypatch.setattr(weight_drift, "MOST", most)
        sides = open_side(str(paths[0])), open_side(str(paths[1]))
        (one,) = weight_distances(sides, lambda _: {"gradient": 1e-6, "optimizer": 1e-6}).values()
        found.append(one)
    assert found[0].name == found[1].name == "head.weight"
    assert 1e-9 < found[0].relative < 1e-7
    assert found[1].relative == pytest.approx(found[0].relative, rel=0.1)
