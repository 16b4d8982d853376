"""Writing of checkpoints: all or nothing, beside the training, and old ones removed only afterwards."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from regress.engine.checkpoint import checkpoint_saver as saver_module
from regress.engine.checkpoint import checkpoint_writer, checkpoints, latest, read_state
from regress.errors import CheckpointError, RegressError
from tests.unit.checkpoint.conftest import Case


def test_another_run_does_not_mix_with_it(case: Case) -> None:
    with pytest.raises(CheckpointError) as caught:
        case.run()
    assert "holds checkpoint-" in str(caught.value)
    assert "go on with it (trainer.resume_from_checkpoint=latest), or choose another" in str(caught.value)


def test_a_first_start_with_latest_begins_at_the_beginning(tmp_path: Path, finished: Path) -> None:
    new = Case(tmp_path / "new")
    new.run("trainer.resume_from_checkpoint=latest")
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (new.folder, finished)]
    assert weights[0] == weights[1]


def test_a_run_that_goes_on_inside_a_step_leaves_the_checkpoint_before_that_step(case: Case) -> None:
    """It was written again where the step went on, with the weights after the updates that were made."""
    kept = {name: digest for name, digest in case.files().items() if name.startswith("checkpoint-1/")}
    case.resume(name="checkpoint-1-update1")
    assert kept
    assert kept.items() <= case.files().items()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("broken", ["save_weights", "write_manifest", "publish"])
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    new, known, calls = Case(tmp_path / "new"), getattr(checkpoint_writer, broken), 0

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return known(*args)

    monkeypatch.setattr(checkpoint_writer, broken, full)
    with pytest.raises(RegressError) as caught:
        new.run("trainer.save_total_limit=1")
    assert str(caught.value) == (
        f"checkpoint-1-update1 cannot be written to {new.folder} (No space left on device); free space there or "
        "choose another trainer.checkpoint_dir: earlier checkpoints are as they were"
    )
    assert [path.name for path in checkpoints(new.folder)] == ["checkpoint-1"]
    read_state(new.folder / "checkpoint-1")
    assert not [path for path in new.folder.iterdir() if path.name.startswith(".")]
    assert not (new.folder / "final").exists()


def test_nothing_is_removed_before_the_new_one_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives back other bytes than it was given."""
    known = checkpoint_writer.publish
    calls = 0

    def spoiled(working: Path, final: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.truncate(working / "model.safetensors", 100)
        known(working, final)

    monkeypatch.setattr(checkpoint_writer, "publish", spoiled)
    new = Case(tmp_path / "new")
    with pytest.raises(RegressError, match="do not match the size and hash"):
        new.run("trainer.save_total_limit=1")
    read_state(new.folder / "checkpoint-0-update1")


def test_a_snapshot_does_not_move_with_the_training(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is written only when later updates are made, and holds the values of its moment."""
    going_on = threading.Event()
    known_write, known_take, takes = saver_module.write_checkpoint, saver_module.take, 0

    def late(*args: Any) -> Any:
        assert going_on.wait(60)
        return known_write(*args)

    def counted(run: Any, *args: Any) -> Any:
        nonlocal takes
        takes += 1
        if takes == 1:
            known = run.trainer.after = run.trainer._train_step

            def stepping(mini: Any) -> Any:
                outcome = known(mini)
                going_on.set()
                return outcome

            run.trainer._train_step = stepping
        return known_take(run, *args)

    monkeypatch.setattr(saver_module, "write_checkpoint", late)
    monkeypatch.setattr(saver_module, "take", counted)
    new = Case(tmp_path / "new")
    new.run()
    for name in ("model.safetensors", "optimizer.safetensors"):
        first = [run / "checkpoint-0-update1" / name for run in (new.folder, finished)]
        assert first[0].read_bytes() == first[1].read_bytes()


def test_only_the_newest_are_kept_and_a_later_segment_is_newer(case: Case) -> None:
    case.resume("trainer.save_total_limit=2", "trainer.save_updates=null", "trainer.save_steps=1")
    assert [path.name for path in checkpoints(case.folder)] == ["checkpoint-1-update1", "checkpoint-2"]
    assert read_state(case.checkpoint("checkpoint-2")).segment == 1
    case.resume("max_steps=2", "trainer.save_total_limit=2", name="checkpoint-1-update1")
    newest = latest(case.folder)
    assert newest is not None
    assert newest.name == "checkpoint-2"
    assert read_state(newest).segment == 2


@pytest.mark.parametrize("prefix", ["partial", "pruned", "replaced"])
def test_what_a_kill_left_half_done_is_finished(case: Case, prefix: str) -> None:
    left = case.folder / f".{prefix}-checkpoint-2"
    case.checkpoint("checkpoint-2").rename(left)
    checkpoint_writer.clean(case.folder)
    assert not left.exists()
    assert case.checkpoint("checkpoint-2").exists() == (prefix == "replaced")


def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path: Path) -> None:
    new = Case(tmp_path / "new")
    with pytest.raises(RegressError, match="holds values that are not finite, so no checkpoint is written"):
        new.run("optimizer.eps=1e-300", "max_steps=1", "trainer.mini_batch_size=null")
    assert checkpoints(new.folder) == []


@pytest.fixture
def store() -> Iterator[str]:
    url = "memory://checkpoints/run"
    yield url
    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


def test_a_store_holds_checkpoints_and_a_run_goes_on_from_there(
    tmp_path: Path, finished: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"trainer.checkpoint_dir={store}"
    new = Case(tmp_path / "new")
    new.run(place, "max_steps=1", "trainer.save_total_limit=1", "trainer.save_steps=1")
    assert [path.name for path in checkpoints(store)] == ["checkpoint-1"]
    new.run(place, "trainer.resume_from_checkpoint=latest")
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (new.folder, finished)]
    assert weights[0] == weights[1]


def test_a_checkpoint_in_a_store_is_none_without_its_manifest(store: str, case: Case) -> None:
    files = fsspec.filesystem("memory")
    for path in case.checkpoint().rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            files.pipe_file(f"/checkpoints/run/checkpoint-1/{path.relative_to(case.checkpoint())}", b"x")
    assert checkpoints(store) == []
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        case.run(f"trainer.resume_from_checkpoint={store}/checkpoint-1")
