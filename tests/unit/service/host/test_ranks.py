"""A host on several ranks is the host of one process, in true float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_ranks import cut, served
from safetensors.numpy import load_file

from regress.dump.request_index import read_requests
from regress.interop.service_dumps import ServiceDump
from regress.parallel.launch.rank_pool import RankPool
from regress.replay.replay_pool import shared_pool
from regress.service.service_api import LoraSpec

TOLERANCE = 1e-12
LAYOUTS = {
    "dp2": ["parallel.dp=2"],
    "ddp2": ["parallel.dp=2", "parallel.data_parallel=ddp"],
    "fsdp2": ["parallel.fsdp=2"],
    "tp2": ["parallel.tp=2", "model.config.num_key_value_heads=2"],
    "pp2": ["parallel.pp=2", "batching.pad_to_length=48", "batching.micro_batch_size=1"],
    "cp2": ["parallel.cp=2", "model.config.num_key_value_heads=2"],
    "lora-fsdp2": ["parallel.fsdp=2"],
    "lora-tp2": ["parallel.tp=2", "model.config.num_key_value_heads=2"],
    "lora-dp2": [
        "parallel.dp=2",
        "parallel.data_parallel=ddp",
        "warm_start.steps=2",
        "warm_start.batch_size=4",
    ],
    "dp2-tp2": ["parallel.dp=2", "parallel.tp=2", "model.config.num_key_value_heads=2"],
}


@pytest.fixture
def pool() -> RankPool:
    return shared_pool()


def _close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def _weights(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*model.safetensors")
    return {**load_file(path), **load_file(folder / "optimizer.safetensors")}


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_process_does(pool: RankPool, tmp_path: Path, layout: str) -> None:
    """Two passes, one that fails between them, a step, a save that another model goes on from, and a sample."""
    chosen = LAYOUTS[layout]
    size = 4 if layout == "dp2-tp2" else 2
    model = [key for key in chosen if not key.startswith("parallel.")]
    lora = LoraSpec(2, train_unembed="tp" not in layout) if "lora" in layout else None
    alone = served(str(tmp_path / "alone"), model, lora)
    ranks = pool.run(served, {"folder": str(tmp_path / "ranks"), "layout": chosen, "lora": lora}, size)
    for found in ranks:
        assert found["failed"] == alone["failed"] == "not_finite"
        assert found["tokens"] == alone["tokens"]
        _close(found["norm"], alone["norm"])
        for kind in ("outputs", "forward"):
            for one, other in zip(found[kind], alone[kind], strict=True):
                assert one.keys() == other.keys()
                for name in one:
                    _close(one[name], other[name])
        for one, other in zip(found["metrics"], alone["metrics"], strict=True):
            assert one.keys() == other.keys()
            _close([one[name] for name in one], [other[name] for name in one])
    expected = _weights(tmp_path / "alone/m0")
    for name, value in _weights(tmp_path / "ranks/m0").items():
        _close(value, expected[name])
    restored = _weights(tmp_path / "ranks/m1")
    for name, value in _weights(tmp_path / "ranks/m0").items():
        assert (value == restored[name]).all(), name
    found = ServiceDump(tmp_path / "ranks/dump")
    assert found.missing(0) == []
    assert all(found.read(name) for name in found.entries)
    lines = read_requests(tmp_path / "ranks/dump")
    recording = {1} if layout == "pp2" else set(range(size))  # the last stage has everything
    assert {part.rank for line in lines for part in line.parts} == recording
    assert all(set(range(len(line.datums))) == {n for p in line.parts for n in p.datums} for line in lines)


def _same_however_cut(found: dict[str, Any]) -> None:
    whole = found.pop("whole")
    for way, other in found.items():
        for index, (one, two) in enumerate(zip(whole["replies"], other["replies"], strict=True)):
            assert np.array_equal(one, two), (way, index)
        for name, value in whole["weights"].items():
            assert np.array_equal(value, other["weights"][name]), (way, name)


@pytest.mark.parametrize(
    "layout",
    ["ddp2", *(pytest.param(name, marks=pytest.mark.extended) for name in LAYOUTS if name != "ddp2")],
)
def test_requests_cut_in_chunks_are_the_whole_request_bit_for_bit(pool: RankPool, layout: str) -> None:
    """The plan depends on the datums of a step: neither ranks nor the order of sums follow the client's cuts."""
    size = 4 if layout == "dp2-tp2" else 2
    alone = cut([key for key in LAYOUTS[layout] if not key.startswith("parallel.")])["whole"]["replies"]
    for found in pool.run(cut, {"layout": LAYOUTS[layout]}, size):
        for one, other in zip(found["whole"]["replies"], alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        _same_however_cut(found)


@pytest.mark.parametrize(
    "batching",
    [
        ["layout=packed", "max_tokens_per_microbatch=60"],
        ["pad_to_multiple_of=1"],  # which is the default: a microbatch of all
        pytest.param(["micro_batch_size=2"], marks=pytest.mark.extended),
        pytest.param(["row_order=longest_first"], marks=pytest.mark.extended),
    ],
    ids=lambda keys: keys[0],
)
def test_microbatches_of_several_datums_do_not_follow_the_cuts(batching: list[str]) -> None:
    """The weights are those of the whole request; replies are of the microbatches that each request has of its own."""
    found = cut([f"batching.{key}" for key in batching])
    for way in found.values():
        way["replies"] = []
    _same_however_cut(found)
