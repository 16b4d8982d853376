"""The golden directory of commands that are given none."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.errors import GoldenError
from regress.golden.golden_directory import golden_directory, installed_cases, open_store


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
        ("[tool.pytest", r"pyproject\.toml is not valid TOML .*; correct it, or give --golden-dir"),
        (
            "[tool.pytest]\nregress_golden_dir = 3",
            r"regress_golden_dir = 3 in .*pyproject\.toml is not a directory",
        ),
        ('[tool.pytest]\nregress_golden_dir = ""', "is not a directory: write a path"),
    ],
)
def test_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(GoldenError, match=says):
        golden_directory(tmp_path)


def distribution(folder: Path, name: str, *, files: bool = True) -> None:
    """Install a distribution of golden cases: a package of data, and the entry point that names it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[regress.cases]\n{name} = {name}\n")
    if files:
        (folder / name / "one").mkdir(parents=True)
        (folder / name / "one" / "case.yaml").write_text("reason: installed\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "pyproject.toml").write_text("")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(site)
    return site


def test_installed_cases_are_those_of_a_project_that_has_none(site: Path, tmp_path: Path) -> None:
    assert installed_cases() is None
    distribution(site, "their_cases")
    assert golden_directory() == site / "their_cases"
    assert open_store(None).names() == ["one"]
    with pytest.raises(GoldenError, match=r"their_cases holds cases that were installed and are only read"):
        open_store(None, writes=True)
    assert open_store(site / "their_cases", writes=True).names() == ["one"]  # who names it means it
    (tmp_path / "project" / "golden").mkdir()
    assert golden_directory() == Path("golden")


def test_installed_cases_that_cannot_be_chosen_or_found(site: Path) -> None:
    distribution(site, "empty_cases", files=False)
    with pytest.raises(GoldenError, match="empty_cases of golden cases is installed without its files"):
        golden_directory()
    distribution(site, "their_cases")
    with pytest.raises(GoldenError, match="empty_cases, their_cases all hold golden cases: choose one"):
        golden_directory()
