"""The golden directory of commands that are given none."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.errors import GoldenError
from regress.golden.location import golden_directory


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "golden"),
        ('[tool.pytest.ini_options]\nregress_golden_dir = "a/b"', "a/b"),
        ('[tool.pytest]\nregress_golden_dir = "c"', "c"),
    ],
)
def test_beside_pyproject(tmp_path: Path, text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "x" / "y").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert golden_directory() == Path(name)
    assert golden_directory(tmp_path / "x" / "y") == Path(name)
    monkeypatch.chdir(tmp_path / "x")
    assert golden_directory() == tmp_path / name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.pytest", r"pyproject\.toml cannot be read .*: correct it, or give --golden-dir"),
        (
            "[tool.pytest]\nregress_golden_dir = 3",
            r"regress_golden_dir = 3 in .*pyproject\.toml is no directory",
        ),
        ('[tool.pytest]\nregress_golden_dir = ""', "is no directory: write a path"),
    ],
)
def test_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(GoldenError, match=says):
        golden_directory(tmp_path)
