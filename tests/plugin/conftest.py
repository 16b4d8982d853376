"""Small projects of users, on which pytest runs with the plugin: without pytest-xdist, with `-n0` and with `-n2`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import regress.golden.golden_directory

# Runs of pytest within this process forget what they import, and numpy cannot be imported twice.
import regress.golden.golden_provenance
import regress.plugin.check_call
import regress.plugin.regress_fixture
import regress.report.report_files

if TYPE_CHECKING:
    from regress.golden.case_manifest import Manifest

GOLDEN = Path(__file__).parents[2] / "golden"
TRUTH = json.loads((GOLDEN / "dr_grpo" / "manifest.json").read_text())["truth"]
"""The quantities recorded at each update of the case of `GoldenProject`."""
MODES = {"no-xdist": (), "n0": ("-p", "xdist", "-n0"), "n2": ("-p", "xdist", "-n2")}


_RECORDED: dict[tuple[str, str], dict[str, bytes]] = {}
"""Files that a session has left which recorded goldens, by its mode and its tests."""


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

    def run_apart(self, *arguments: str) -> pytest.RunResult:
        """Run pytest in its mode as a process of its own, which may be interrupted."""
        return self._pytester.runpytest_subprocess("-p", "regress.plugin", *MODES[self.mode], *arguments)

    def passes(self, *arguments: str, count: int) -> pytest.RunResult:
        """Run pytest; `count` tests pass and nothing else happens."""
        result = self.run(*arguments)
        result.assert_outcomes(passed=count)
        assert result.ret == 0
        return result

    def records(self, tests: str, count: int) -> None:
        """Write tests and record their goldens: by pytest where no test before did so in this mode, else as it left
        them.
        """
        self.write("test_it.py", tests)
        kept = _RECORDED.get((self.mode, tests))
        if kept is None:
            self.passes("--update-golden", count=count)
            folders = (self.folder / name for name in ("golden", ".pytest_cache"))
            files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
            kept = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}
            _RECORDED[self.mode, tests] = kept
            return
        for name, data in kept.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

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
        """Return the orphans that `regress golden prune` would remove, or None."""
        path = self.folder / ".pytest_cache/v/regress/orphans"
        found: list[str] | None = json.loads(path.read_text()) if path.exists() else None
        return found


class GoldenProject(Project):
    """A project with the golden case `dr_grpo`, whose replays are copies of one made beforehand; see stub_engine.py."""

    CASE = "dr_grpo"
    TESTS = 3
    """Tests of the case under one variant in one precision: of the whole, of its rank, and of its microbatch."""
    QUANTITIES = sum(len(recorded) + 3 for recorded in TRUTH.values())
    """Quantities that they judge: in each of three steps of one update all that are recorded, the trajectories, the
    coverage and the invariants.
    """

    def __init__(self, pytester: pytest.Pytester, mode: str, made: Path) -> None:
        super().__init__(pytester, mode)
        shutil.copytree(GOLDEN / self.CASE, self.folder / "golden" / self.CASE)
        shutil.copyfile(Path(__file__).with_name("stub_engine.py"), self.folder / "conftest.py")
        self.write("made.txt", str(made))
        self.write("pytest.ini", "[pytest]\nregress_matrix = full\n")  # any variant on this case
        self.suite()

    def suite(self, mark: str = 'variants="base"') -> None:
        """Write the tests of golden cases; `mark` are the arguments of their marker."""
        lines = ["import pytest", f"@pytest.mark.regress({mark})", "def test_golden(regress_record):"]
        self.write("test_suite.py", "\n".join([*lines, "    regress_record.check()", ""]))

    def fault(self, **variants: object) -> None:
        """Say what shall become of variants."""
        self.write("stub.json", json.dumps(variants))

    def replayed(self) -> list[str]:
        """The replays since this was last asked."""
        path = self.folder / "replays.txt"
        found = path.read_text().split() if path.is_file() else []
        path.unlink(missing_ok=True)
        return sorted(found)

    def store(self) -> regress.golden.golden_directory.GoldenStore:
        """The golden directory."""
        return regress.golden.golden_directory.GoldenStore(self.folder / "golden")

    def manifest(self) -> Manifest:
        """Return the manifest of the case."""
        found = self.store().case(self.CASE).manifest
        assert found is not None
        return found


def judged(result: pytest.RunResult) -> str:
    """Return how many quantities of golden cases a session says that it judged."""
    (line,) = (line for line in result.outlines if " judged in " in line)
    return line.removeprefix("regress: ")


def failed_quantities(result: pytest.RunResult) -> list[str]:
    """Return the names of the quantities that pytest lists as failed subtests."""
    found = (re.match(r"SUBFAILED\[(\S+)\] ", line) for line in result.outlines)
    return [one[1] for one in found if one is not None]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plugins nor settings of whoever runs these tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    logs = ("GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "FORCE_COLOR")
    workers = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", *workers, *logs):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(pytester: pytest.Pytester) -> Project:
    """A project whose tests run in one process, without pytest-xdist."""
    return Project(pytester, "no-xdist")


@pytest.fixture(params=sorted(MODES))
def project(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Project:
    """A project in each mode."""
    return Project(pytester, request.param)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of the case of `GoldenProject` in float64."""
    import regress.replay.case_recording  # with torch, see above
    import regress.replay.tolerance_calibration
    from regress.replay.case_run import replay
    from regress.replay.variant import Precision
    from regress.replay.variant_table import BASE

    case = regress.golden.golden_directory.GoldenStore(GOLDEN).case(GoldenProject.CASE)
    return replay(case, BASE, Precision.FLOAT64, tmp_path_factory.mktemp("made")).folder


@pytest.fixture
def stubbed(pytester: pytest.Pytester, made: Path) -> GoldenProject:
    """A project with a golden case, in one process."""
    return GoldenProject(pytester, "no-xdist", made)


@pytest.fixture(params=sorted(MODES))
def everywhere(request: pytest.FixtureRequest, pytester: pytest.Pytester, made: Path) -> GoldenProject:
    """A project with a golden case, in each mode."""
    return GoldenProject(pytester, request.param, made)


ALIKE = {
    *("test_misuse", "test_options", "test_orphans", "test_reports", "test_update"),
    "test_a_failing_replay_reaches_the_report",
    "test_a_broken_module_hinders_no_other",
    "test_an_interrupted_run_looks_for_no_orphans",
    "test_what_a_test_tells_reaches_junit",
    "test_an_interrupt_changes_nothing",
    "test_an_internal_error_changes_nothing",
    "test_values_of_a_test_that_fails_in_any_phase_are_dropped",
    "test_the_others_are_written_when_one_test_fails",
    "test_a_golden_directory_that_cannot_be_written_is_told",
    "test_only_what_failed_is_updated",
    "test_the_failed_ones_run_again_as_a_whole",
    "test_a_session_whose_golden_tests_judge_nothing_fails",
    "test_only_what_is_named_is_judged",
    "test_the_first_failing_quantity_ends_a_run_that_shall_end_there",
    "test_a_misspelt_name_that_selects_nothing_is_named",
}
"""Modules and tests in which workers make little difference: with workers they are extended tests.

Those with pytest-xdist and no workers are, too, but for one module, which shows what a session of this kind does.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent != here:
            continue
        alike = {item.path.stem, item.name.partition("[")[0]} & ALIKE
        modes = ("[n2",) if item.path.stem == "test_update" else ("[n2", "[n0")
        if alike and any(mode in item.name for mode in modes):
            item.add_marker(pytest.mark.extended)
