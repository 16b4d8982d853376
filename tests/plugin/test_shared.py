"""The folder that the processes of a session share: gone with the session, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from regress.plugin.shared import PREFIX, SharedFolder

PROGRAM = """
import tempfile
tempfile.tempdir = {folder!r}
from regress.plugin.shared import SharedFolder
found = SharedFolder()
(found.path / "replays").mkdir()
print(found.path, flush=True)
input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_removed_with_what_it_holds(temporary: Path) -> None:
    found = SharedFolder()
    (found.path / "replays").mkdir()
    assert found.path.parent == temporary
    found.remove()
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_session_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    temporary: Path,
) -> None:
    program = [sys.executable, "-c", PROGRAM.format(folder=str(temporary))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        try:
            SharedFolder().remove()
            assert (path / "replays").is_dir()
        finally:
            other.kill()
    assert path.is_dir()
    SharedFolder().remove()
    assert not path.exists()


def test_folders_of_others_are_left_alone(temporary: Path) -> None:
    (temporary / "regress-record-x").mkdir()
    (temporary / f"{PREFIX}file").write_text("")
    SharedFolder().remove()
    assert len(list(temporary.iterdir())) == 2
