"""Small projects of users, on which pytest runs with the plugin: without pytest-xdist, with `-n0` and with `-n2`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Runs of pytest within this process forget what they import, and numpy cannot be imported twice.
import regress.golden.provenance
import regress.golden.store
import regress.plugin.checking
import regress.plugin.failing  # noqa: F401 - see above

MODES = {"no-xdist": (), "n0": ("-p", "xdist", "-n0"), "n2": ("-p", "xdist", "-n2")}


class Project:
    """A folder with tests and goldens.

    Attributes:
        folder: where it lies; pytest runs there.
        mode: how pytest runs, one of `MODES`.
    """

    def __init__(self, pytester: pytest.Pytester, mode: str) -> None:
        self._pytester, self.mode, self.folder = pytester, mode, pytester.path
        self.write("pytest.ini", "[pytest]")

    def write(self, name: str, text: str) -> Path:
        """Write a file; the indentation of its first line is taken off all lines."""
        import textwrap

        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run pytest in its mode."""
        return self._pytester.runpytest_inprocess("-p", "regress.plugin", *MODES[self.mode], *arguments)

    def passes(self, *arguments: str, count: int) -> pytest.RunResult:
        """Run pytest; `count` tests pass and nothing else happens."""
        result = self.run(*arguments)
        result.assert_outcomes(passed=count)
        assert result.ret == 0
        return result

    def refuses(self, *arguments: str, says: str) -> None:
        """Run pytest, which refuses its arguments in one line and runs nothing."""
        result = self.run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        errors = [line.removeprefix("ERROR: ") for line in result.errlines if line.startswith("ERROR: ")]
        assert errors == [says.replace("FOLDER", str(self.folder))]
        assert "passed" not in result.stdout.str()

    def goldens(self) -> dict[str, bytes]:
        """All files of the golden directory."""
        root = self.folder / "golden"
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def orphans(self) -> list[str] | None:
        """What `regress golden prune` would be told, or None."""
        path = self.folder / ".pytest_cache/v/regress/orphans"
        found: list[str] | None = json.loads(path.read_text()) if path.exists() else None
        return found


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plugins nor settings of whoever runs these tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(pytester: pytest.Pytester) -> Project:
    """A project whose tests run in one process, without pytest-xdist."""
    return Project(pytester, "no-xdist")


@pytest.fixture(params=sorted(MODES))
def project(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Project:
    """A project in each mode."""
    return Project(pytester, request.param)
