"""Recording of what public commands say, and the differences of two recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.broken_dumps import BREAKAGES, write_broken
from tests.shield import main


def recorded(folder: Path, **values: Any) -> str:
    folder.mkdir()
    (folder / "replays.json").write_text(json.dumps(values))
    return str(folder)


def test_recordings_of_one_tree_are_equal(tmp_path: Path) -> None:
    """Nothing that differs between two runs of one commit may remain, or every difference drowns in them."""
    for name in ("before", "after"):
        result = CliRunner().invoke(main, ["record", str(tmp_path / name), "--section", "help"])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(main, ["diff", str(tmp_path / "before"), str(tmp_path / "after")])
    assert (result.exit_code, result.output) == (0, "1 sections: no difference\n")
    commands = json.loads((tmp_path / "before/help.json").read_text())
    assert "Usage: regress dump check [OPTIONS] PATH" in commands["regress dump check"]


def test_each_difference_is_a_line(tmp_path: Path) -> None:
    before = recorded(tmp_path / "before", failed=0, checks=[{"error": 0.5}, {"error": 0.5}], gone=1)
    after = recorded(tmp_path / "after", failed=0, checks=[{"error": 0.5}, {"error": 0.25}], new=[2])
    result = CliRunner().invoke(main, ["diff", before, after])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "replays.json/checks[1]/error: 0.5 -> 0.25",
        "replays.json/gone: gone: 1",
        "replays.json/new: new: [2]",
    ]


def test_a_section_of_one_recording_alone_is_no_equality(tmp_path: Path) -> None:
    before = recorded(tmp_path / "before", failed=0)
    (tmp_path / "after").mkdir()
    result = CliRunner().invoke(main, ["diff", before, str(tmp_path / "after")])
    assert (result.exit_code, result.output) == (
        1,
        f"{tmp_path / 'after/replays.json'} is missing: record that section, too\n",
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from regress.cli import main as regress

    kept = tmp_path_factory.mktemp("kept")
    words = ["replay", "dense", "--variants", "mbs4", "--keep-dumps", str(kept)]
    assert CliRunner().invoke(regress, words).exit_code == 0
    return kept / "dense/mbs4/dump"


def files(dump: Path) -> Any:
    return json.loads((dump / "manifest.json").read_text())["files"]


@pytest.mark.extended
def test_every_breakage_breaks(healthy: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """A breakage that changes nothing would record the healthy dump again."""
    for name, breakage in BREAKAGES.items():
        with subtests.test(name):
            write_broken(healthy, tmp_path / name, breakage)
            assert (files(tmp_path / name) == files(healthy)) == (name == "healthy")
