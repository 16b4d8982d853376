"""Golden directories on the Hugging Face hub: a dataset at a revision, from the cache of this machine, only read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.errors import GoldenError
from regress.golden.golden_directory import golden_directory
from regress.golden.hub_goldens import hub_address, hub_directory

CASE = Path(__file__).parents[3] / "golden" / "dense"
COMMIT = "c" * 40
ADDRESS = "hf://datasets/org/cases@v1"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A case in the hub's cache, as the hub's client lays it out: links to files named by hash."""
    home = tmp_path / "hub" / "datasets--org--cases"
    folder = home / "snapshots" / COMMIT
    (home / "refs").mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs" / "v1").write_text(COMMIT)
    for number, file in enumerate(sorted(path for path in CASE.rglob("*") if path.is_file())):
        blob, place = home / "blobs" / f"hash{number}", folder / "dense" / file.relative_to(CASE)
        blob.write_bytes(file.read_bytes())
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(blob, place.parent))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_dataset_is_a_golden_directory(snapshot: Path) -> None:
    for words, shown in (
        (["list"], "dense"),
        (["show", "dense"], "log_probs"),
        (["verify"], "1 case: intact"),
    ):
        done = CliRunner().invoke(main, ["golden", *words, "--golden-dir", ADDRESS])
        assert done.exit_code == 0, done.output
        assert shown in done.output
    assert hub_directory(ADDRESS) == snapshot
    assert hub_address(snapshot) == f"hf://datasets/org/cases@{COMMIT}"


def test_a_folder_of_a_dataset_and_a_project_that_names_it(snapshot: Path, tmp_path: Path) -> None:
    address = f"{ADDRESS}/dense"
    (tmp_path / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\nregress_golden_dir = "{address}"\n')
    assert golden_directory() == snapshot / "dense"
    assert hub_address(golden_directory()) == f"hf://datasets/org/cases@{COMMIT}/dense"


def test_a_replay_says_which_revision_it_read(snapshot: Path) -> None:
    words = ["replay", "dense", "--variants", "base", "--golden-dir", ADDRESS, "--report", "out"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    report = json.loads(Path("out/report.json").read_text())
    assert report["environment"]["golden"] == f"hf://datasets/org/cases@{COMMIT}"


def test_it_is_never_written(snapshot: Path) -> None:
    done = CliRunner().invoke(main, ["golden", "prune", "--golden-dir", ADDRESS])
    assert done.exit_code == 2
    assert f"hf://datasets/org/cases@{COMMIT} is only read: download it" in done.output


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "hf://datasets/org/cases",
            r"is not an address of goldens on the hub: write hf://datasets/ORG/NAME@REVISION, where",
        ),
        ("hf://org/cases@v1", r"is not an address of goldens on the hub"),
        ("hf://datasets/org/cases@v1/../../x", r"is not an address of goldens on the hub"),
        (
            "hf://datasets/org/cases@v2",
            r"not in the hub's cache .*HF_HUB_OFFLINE is set\): run hf download org/cases ",
        ),
        (
            "hf://datasets/org/other@v1",
            r"cannot be downloaded .* --repo-type dataset --revision v1 where there is a",
        ),
    ],
)
def test_what_leads_nowhere_is_refused(snapshot: Path, address: str, sentence: str) -> None:
    with pytest.raises(GoldenError, match=sentence):
        hub_directory(address)


def test_other_directories_have_no_address(tmp_path: Path) -> None:
    assert hub_address(tmp_path / "datasets--org--cases" / "blobs" / "x") is None
    assert hub_address(Path("golden")) is None
