"""Dumps in stores, as people ask for them: by a URL in place of a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from regress.dump import DumpReader

TESTS = Path(__file__).parents[1]
GOLDEN = str(TESTS.parents[1] / "golden")


@pytest.fixture
def memory() -> Iterator[dict[str, Any]]:
    """Provide the files under `memory://`, none at first."""
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


def test_train_records_and_replays(
    command: Callable[..., Any], small: tuple[str, ...], memory: dict[str, Any]
) -> None:
    dumping = ("debug.enable_data_dump=true", "debug.dump_options={trajectory: true, gradient: true}")
    recorded = command("train", *small, *dumping, "debug.dump_dir=memory://first", "output_dir=first")
    assert recorded.exit_code == 0, recorded.output
    assert "tensors:      memory://first\n" in recorded.output
    mock = ("rollout_worker.type=mock", "rollout_worker.need_llm_inference=false", "output_dir=second")
    for path in ("memory://first", "memory://first/trajectory"):
        load = f"rollout_worker.trajectory_load_path={path}"
        options = ("debug.overwrite=true", "debug.dump_dir=memory://second")
        replayed = command("train", "--overwrite", *small, *dumping, *mock, *options, load)
        assert replayed.exit_code == 0, replayed.output
        found = command("dump", "diff", "memory://first", "memory://second")
        assert found.exit_code == 0
        assert found.stdout.startswith("bit-identical: 4 records, ")
    again = command("train", *small, *dumping, "debug.dump_dir=memory://first", "output_dir=third")
    assert again.exit_code == 2
    assert "memory://first already holds a dump" in again.stderr


def test_rollouts_are_recorded_and_replayed(
    command: Callable[..., Any], small: tuple[str, ...], memory: dict[str, Any]
) -> None:
    rollouts = ("rollout_mock.enable=true", "rollout_mock.dump_dir=memory://rollouts", "output_dir=out")
    both = ("--overwrite", *small, *rollouts, "evaluation.every_n_steps=1")
    assert command("train", *both).exit_code == 0
    assert {name.split("/")[2] for name in memory} == {"train", "val", "manifest.json"}
    replayed = command("train", *both, "rollout_mock.mode=mock")
    assert replayed.exit_code == 0, replayed.output
    MemoryFileSystem().rm_file("/rollouts/manifest.json")
    refused = command("train", *both, "rollout_mock.mode=mock")
    assert "memory://rollouts is not a complete dump: it has no manifest.json" in refused.stderr


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A protocol that every process of this test knows as it knows s3: by the entry point of a package."""
    package = tmp_path / "packages" / "shelf-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[fsspec.specs]\nshelf = shelf:Shelf\n")
    for folder in (package.parent, TESTS / "dump"):
        monkeypatch.syspath_prepend(folder)
    import shelf

    shelf.register()
    (tmp_path / "store").mkdir()
    yield tmp_path / "store"
    sys.modules.pop("shelf")


@pytest.mark.parametrize("protocol", ["file", "shelf"])
@pytest.mark.extended
def test_ranks_of_a_launcher_dump_into_one_store(
    command: Callable[..., Any], shelf: Path, protocol: str
) -> None:
    replay = ("replay", "dr_grpo", "--golden-dir", GOLDEN, "--variants", "dp2", "--launcher", "torchrun")
    result = command(*replay, "--work", f"{protocol}://{shelf}/work", "--keep-dumps", "kept")
    assert result.exit_code == 0, result.output
    assert "all within tolerance" in result.output
    assert list(shelf.iterdir()) == []
    kept = Path("kept", "dr_grpo", "dp2", "dump")
    assert {record.rank for record in DumpReader(kept).records("loss")} == {0, 1}


def test_where_replays_cannot_dump(
    command: Callable[..., Any], sentence: Callable[..., str], shelf: Path
) -> None:
    replay = ("replay", "dr_grpo", "--golden-dir", GOLDEN, "--variants", "base", "--launcher", "torchrun")
    (shelf / "work").mkdir()
    for url in (f"file://{shelf}/work", f"shelf://{shelf}/work"):
        refused = command(*replay, "--work", url)
        assert sentence(refused).endswith(
            f"{shelf}/work exists, but every run needs a folder of its own; give another --work"
        )
    refused = command(*replay, "--work", "s3://bucket/work")
    assert sentence(refused).startswith("s3://bucket/work cannot be opened (Install s3fs to access S3; ")
    refused = command(*replay, "--keep-dumps", "s3://bucket/kept")
    assert sentence(refused).startswith(
        "s3://bucket/kept is the URL of a store, but a folder of this machine is "
    )
