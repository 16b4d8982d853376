"""Values that cannot be recorded are refused where they are tapped, in one sentence with the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from regress.dump import Recorder, at, recording, tap
from regress.dump.dump_manifest import MANIFEST
from regress.errors import DumpError
from regress.replay.replay_pool import shared_pool

sys.path.insert(0, str(Path(__file__).parent))  # ranks import the taps by name

from distributed_tensors import refused

LOSS = {"loss": True}


@pytest.mark.extended
def test_a_tensor_that_lies_on_many_ranks(tmp_path: Path) -> None:
    sentence = (
        "DumpError: tensor 'model.weight' is a DTensor, of which this rank holds a part: tap its to_local() with its "
        'shard layout in meta["shards"], or its full_tensor(), or let regress.record() do it'
    )
    assert shared_pool().run(refused, {"folder": tmp_path}, 1) == [[sentence] * 2]


def test_a_tensor_without_values(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options=LOSS)), at(step=0):
        with pytest.raises(
            DumpError,
            match="tensor 'loss' is on the meta device, where tensors have no values: tap it after it was",
        ):
            tap("loss", loss=torch.zeros((), device="meta"))
        tap("loss", loss=torch.zeros(()))


def test_a_type_that_does_not_exist(tmp_path: Path) -> None:
    """It would be dropped like a type that nobody asked for."""
    with recording(Recorder(tmp_path, options=LOSS)), at(step=0):
        with pytest.raises(
            DumpError, match=r"record type 'foward_data' does not exist: did you mean forward_data"
        ):
            tap("foward_data", log_probs=torch.zeros(1, 2))
        tap("forward_data", log_probs=torch.zeros(1, 2))  # exists, and nobody asked for it


def test_a_rank_of_its_own_needs_the_others(tmp_path: Path) -> None:
    Recorder(tmp_path, options=LOSS)
    with pytest.raises(
        DumpError,
        match=r"rank 1 would record into .* without rank 0: ranks that record one run into one directory give rank= "
        r"and gather=",
    ):
        Recorder(tmp_path, options=LOSS, rank=1)


def test_two_recorders_in_one_directory(tmp_path: Path) -> None:
    """Both believe to be alone; the manifest of either would not be that of the directory."""
    first, second = (Recorder(tmp_path, options=LOSS) for _ in range(2))
    for rank, recorder in enumerate((first, second)):
        with at(step=0, rank=rank):
            token = recording(recorder)
            token.__enter__()
            tap("loss", loss=1.0)
            recorder.flush()
            token.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(
        DumpError,
        match=r"another recorder has written into .* \(loss/step_000000_rank1.safetensors\), too: ranks",
    ):
        first.close()
    assert not (tmp_path / MANIFEST).exists()
