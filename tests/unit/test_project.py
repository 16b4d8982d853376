"""A pyproject.toml of any shape: one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.errors import ConfigError, RegressError
from regress.golden.golden_directory import golden_directory
from regress.project_settings import project_section

SHAPES = {
    "no TOML": "[",
    "deep": "a = " + "[" * 20_000,
    "long": f"a = {'9' * 5000}",
    "bytes": "a = '\udcff'",
    "tool": "tool = 3",
    "regress": "[tool]\nregress = [1]",
    "unknown": "[tool.regress]\nother = 1",
    "pytest": "[tool]\npytest = 'x'",
    "options": "[tool.pytest]\nini_options = [1]",
    "directory": "[tool.pytest.ini_options]\nregress_golden_dir = 5",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_read_or_refused_in_one_sentence(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_bytes(SHAPES[shape].encode("utf-8", "surrogateescape"))
    said = []
    for read in (lambda: project_section(tmp_path, "replay"), lambda: golden_directory(tmp_path)):
        try:
            read()
        except RegressError as error:
            said.append(str(error))
    assert bool(said) == (shape not in ("tool", "pytest", "options"))
    for sentence in said:
        assert sentence.isprintable()
        assert str(path) in sentence


def test_what_is_no_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").mkdir()
    assert project_section(tmp_path, "replay") is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyproject.toml").write_bytes(b"\0" * (20 << 20))
    with pytest.raises(ConfigError, match="more than any file of its kind"):
        project_section(other, "replay")
