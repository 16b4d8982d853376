"""`record` on several ranks: each way to spread a batch equals one process, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture_loops import compare, failed, recorded
from capture_ranks import run_ranks, train_slices

from regress.dump.dump_reader import DumpReader

MESHES = {
    "ddp": {"dp": 2},
    "ddp_inner": {"dp": 2},
    "fsdp2": {"fsdp": 2},
    "fsdp2_fused": {"fsdp": 2},
    "fsdp2_head": {"fsdp": 2},
    "hsdp": {"dp": 2, "fsdp": 2},
    "tp": {"tp": 2},
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "dump"
    recorded(folder, options={"token_gradient": True})
    return folder


@pytest.mark.parametrize(
    ("job", "world"),
    [
        ("fsdp2", 2),
        ("fsdp2 from hidden_states", 2),
        pytest.param("ddp from hidden_states", 2, marks=pytest.mark.extended),
        pytest.param("tp from hidden_states", 2, marks=pytest.mark.extended),
        pytest.param("fsdp2_fused", 2, marks=pytest.mark.extended),
        pytest.param("fsdp2_head", 2, marks=pytest.mark.extended),
        pytest.param("fsdp2_head from hidden_states", 2, marks=pytest.mark.extended),
        pytest.param("ddp", 2, marks=pytest.mark.extended),
        pytest.param("ddp_inner", 2, marks=pytest.mark.extended),
        pytest.param("tp", 2, marks=pytest.mark.extended),
        pytest.param("hsdp", 4, marks=pytest.mark.extended),
    ],
)
def test_ranks_equal_one_process(tmp_path: Path, golden: Path, job: str, world: int) -> None:
    if job.startswith("tp"):  # torch cannot clip gradients that are distributed together with plain ones
        golden = tmp_path / "golden"
        recorded(golden, clip=None, options={"token_gradient": True})
    run_ranks(world, job, tmp_path / "dump")
    report = compare(golden, tmp_path / "dump")
    assert report.exit_code == 0, failed(report)
    checked = {verdict.quantity for verdict in report.verdicts}
    assert {"log_probs", "loss", "token_gradient", "gradient", "param", "optimizer"} <= checked
    if job.startswith("fsdp2"):
        norms = [v.place.rank for v in report.verdicts if v.quantity == "grad_norm"]
        assert norms == [0, 1] * 2, "the norm of shards is that of the trainer, on each rank"
    mesh = DumpReader(tmp_path / "dump").manifest.provenance.mesh
    assert mesh == {"world_size": world, **MESHES[job.split()[0]]}


def test_ranks_of_which_nothing_tells_what_they_share(tmp_path: Path) -> None:
    run_ranks(2, "nothing_told", tmp_path / "dump")


@pytest.mark.extended
def test_slices_of_sequences_equal_whole_ones(tmp_path: Path) -> None:
    train_slices(tmp_path / "golden", 0, 1, None)
    run_ranks(2, "sequence", tmp_path / "dump")
    report = compare(tmp_path / "golden", tmp_path / "dump")
    assert report.exit_code == 0, failed(report)
    assert DumpReader(tmp_path / "dump").manifest.provenance.mesh == {"world_size": 2, "cp": 2}
