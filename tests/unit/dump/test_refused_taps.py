"""Values that cannot be recorded are refused where they are tapped, in one sentence with the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regress.dump import Recorder, at, recording, tap
from regress.dump.manifest import MANIFEST
from regress.errors import DumpError

LOSS = {"loss": True}

DTENSOR = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from regress.dump import Recorder, at, recording, tap
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
part = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
with recording(Recorder(sys.argv[1], options={"param": True})), at(step=0, rank=0):
    for value in (part, torch.nn.Parameter(part)):
        try:
            tap("param", **{"model.weight": value})
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    tap("param", **{"model.weight": part.to_local()})
dist.destroy_process_group()
"""


def test_a_tensor_that_lies_on_many_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DTENSOR, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    sentence = (
        "DumpError: tensor 'model.weight' is a DTensor, of which this rank holds a part: tap its to_local() with its "
        'shard layout in meta["shards"], or its full_tensor(), or let regress.record() do it'
    )
    assert done.stdout.splitlines() == [sentence] * 2, done.stderr
    assert done.returncode == 0


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
