"""Readers of other systems: registered by entry point, as our own are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from regress import plugins
from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.opened_dump import close_sides, open_side
from regress.errors import DumpError

Register = Callable[..., None]

READER = """
import numpy as np
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record

class Lines:
    system, mesh, config, precision, notes = "lines", {}, {}, None, ("lines tell no mesh",)
    def __init__(self, path):
        self.folder = path
        self.entries = {"w": ("param", Coordinates(0))}
    def read(self, name):
        text = (self.folder / "weights.lines").read_text()
        return Record("param", 0, {"w": np.array([float(line) for line in text.split()])})
    def raw(self, type, step): return None
    def verify(self, name): pass
    def root(self, rank): return rank
    def writes(self, stage, tensor=None): return True

class Reader:
    name = "lines"
    def matches(self, path): return (path / "weights.lines").is_file()
    def open(self, path): return Lines(path)

class Broken(Reader):
    def matches(self, path): return 1 / 0

class Half(Reader):
    def open(self, path): return object()

READER, BROKEN, HALF = Reader(), Broken(), Half()
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Makes the entry points of an installed package."""
    (tmp_path / "lines_reader.py").write_text(READER)
    monkeypatch.syspath_prepend(tmp_path)

    def points(*names: str) -> None:
        found = [EntryPoint(name.lower(), f"lines_reader:{name}", plugins.SOURCES) for name in names]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        plugins.registered.cache_clear()
        close_sides()

    yield points
    sys.modules.pop("lines_reader", None)
    plugins.registered.cache_clear()
    close_sides()


def source(folder: Path, *values: float) -> str:
    folder.mkdir()
    (folder / "weights.lines").write_text("\n".join(map(str, values)))
    return str(folder)


def test_a_reader_of_somebody_else(tmp_path: Path, register: Register) -> None:
    golden, actual = source(tmp_path / "a", 1.0, 2.0), source(tmp_path / "b", 1.0, 2.5)
    with pytest.raises(DumpError, match="is not a complete dump"):
        compare_dumps(golden, actual)
    register("READER")
    found = compare_dumps(golden, actual)
    assert found.exit_code == 1
    assert "golden dump: lines tell no mesh" in found.notes
    assert compare_dumps(golden, golden).exit_code == 0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["BROKEN"],
            r"the reader 'broken' \(lines_reader:BROKEN\) failed in matches\(.*\) "
            r"\(ZeroDivisionError: division by zero\): repair or uninstall the package that registers it",
        ),
        (["NOBODY"], r"the reader 'nobody' \(lines_reader:NOBODY\) failed in matches"),
        (
            ["HALF"],
            r"the reader 'half' \(lines_reader:HALF\) opens .* as something without folder: repair or uninstall",
        ),
        (
            ["READER", "HALF"],
            r"is claimed by the reader 'half' \(lines_reader:HALF\) and the reader 'reader' \(lines_reader:READER\): "
            "uninstall one of them",
        ),
    ],
)
def test_a_broken_reader_is_named(tmp_path: Path, register: Register, names: list[str], words: str) -> None:
    register(*names)
    folder = source(tmp_path / "a", 1.0)
    with pytest.raises(DumpError, match=words) as caught:
        open_side(folder)
    assert "\n" not in str(caught.value)
