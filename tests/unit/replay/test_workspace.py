"""Temporary folders are gone with whoever made them, however that ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from regress.replay.temporary_workspace import PREFIX, Workspace

PROGRAM = """
import tempfile
tempfile.tempdir = {folder!r}
from regress.replay.temporary_workspace import Workspace
found = Workspace()
(found.path / "replays").mkdir()
print(found.path, flush=True)
input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_removed_with_what_it_holds(temporary: Path) -> None:
    found = Workspace()
    (found.path / "replays").mkdir()
    assert found.path.parent == temporary
    found.remove()
    assert list(temporary.iterdir()) == []


def test_what_breaks_off_leaves_nothing(temporary: Path) -> None:
    def work() -> None:
        with Workspace() as folder:
            (folder / "dump").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    temporary: Path,
) -> None:
    program = [sys.executable, "-c", PROGRAM.format(folder=str(temporary))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        try:
            Workspace().remove()
            assert (path / "replays").is_dir()
        finally:
            other.kill()
    assert path.is_dir()
    Workspace().remove()
    assert not path.exists()


def test_folders_of_others_are_left_alone(temporary: Path) -> None:
    (temporary / "regress-record-x").mkdir()
    (temporary / f"{PREFIX}file").write_text("")
    Workspace().remove()
    assert len(list(temporary.iterdir())) == 2


def test_that_of_a_process_that_a_signal_ends_while_it_is_made_is_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(self: Path, mode: int) -> None:
        mkdir(self, mode)
        raise SystemExit(143)

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", ended)
    with pytest.raises(SystemExit):
        Workspace()
    gc.collect()
    assert list(temporary.iterdir()) == []
