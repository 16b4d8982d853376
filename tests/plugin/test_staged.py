"""Values staged during an update: dropped with a test that fails, and all of them with a session that breaks off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.errors import GoldenError
from regress.plugin.golden_update import StagedValues, staged_checks

OLD = "def test_{0}(regress):\n    regress.check('x', {0}.5)\n    regress.check('y', {0}.5)\n"
SIX = "".join(OLD.format(number) for number in range(6))
BROKEN = "regress: no golden was written, because the session was interrupted: run the update again"


@pytest.fixture
def recorded(project: Any) -> Any:
    """A project whose six tests have two goldens each, and compute other values since."""
    project.records(SIX, count=6)
    project.write("test_it.py", SIX.replace(".5", ".25"))
    return project


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """Tests whose goldens are new or other bytes."""
    names = (name for name in before | after if after.get(name) != before.get(name))
    return {name.split("/")[-1].split("-")[0] for name in names}


ENDS = {
    "exit": "pytest.exit('enough')",
    "failure": "assert False",
    "check": "regress.check('z', float('nan'))",
}


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        pytest.param("exit", (), marks=pytest.mark.extended),
        ("failure", ("-x",)),
        pytest.param("check", ("--maxfail=1",), marks=pytest.mark.extended),
        pytest.param("failure", ("--sw",), marks=pytest.mark.extended),
    ],
)
def test_a_session_that_breaks_off_changes_nothing(
    recorded: Any, end: str, arguments: tuple[str, ...]
) -> None:
    recorded.write("test_zz.py", f"import pytest\ndef test_end(regress):\n    {ENDS[end]}\n")
    before = recorded.goldens()
    result = recorded.run("--update-golden", *arguments)
    assert result.ret != 0
    result.stdout.fnmatch_lines([BROKEN])
    result.stdout.no_fnmatch_line("*golden update*")
    result.stdout.no_fnmatch_line("*no golden had to be written*")
    assert recorded.goldens() == before


def test_an_interrupt_changes_nothing(recorded: Any) -> None:
    recorded.write("test_zz.py", "def test_end():\n    raise KeyboardInterrupt\n")
    before = recorded.goldens()
    result = recorded.run_apart("--update-golden")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([BROKEN])
    assert recorded.goldens() == before


def test_an_internal_error_changes_nothing(recorded: Any) -> None:
    recorded.write(
        "conftest.py",
        """
        def pytest_runtest_logreport(report):
            if report.nodeid.endswith("test_4") and report.when == "teardown":
                raise ZeroDivisionError
        """,
    )
    before = recorded.goldens()
    assert recorded.run("--update-golden").ret == pytest.ExitCode.INTERNAL_ERROR
    assert recorded.goldens() == before


FAULTS = """
import pytest

@pytest.fixture
def late():
    yield
    raise ValueError

@pytest.fixture
def early(regress):
    regress.check("x", 1.0)
    raise ValueError

def test_setup(early):
    pass

def test_call(regress):
    regress.check("x", 1.0)
    assert False

def test_teardown(regress, late):
    regress.check("x", 1.0)

def test_refused(regress):
    regress.check("x", 1.0)
    regress.check("y", float("inf"))

@pytest.mark.xfail
def test_expected(regress):
    regress.check("x", 1.0)
    assert False

@pytest.mark.xfail(strict=True)
def test_unexpected(regress):
    regress.check("x", 1.0)

def test_subtest(regress, subtests):
    regress.check("x", 1.0)
    with subtests.test("part"):
        assert False

@pytest.mark.xfail
def test_better(regress):
    regress.check("x", 1.0)

def test_skip(regress):
    regress.check("x", 1.0)
    pytest.skip("for the rest")

def test_good(regress):
    regress.check("x", 1.0)
"""


def test_values_of_a_test_that_fails_in_any_phase_are_dropped(project: Any) -> None:
    project.write("test_it.py", FAULTS)
    result = project.run("--update-golden")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    names = [name for name in project.goldens() if name.endswith(".check")]
    assert {name.split("/")[-1].split("-")[0] for name in names} == {"test_better", "test_skip", "test_good"}
    result.stdout.fnmatch_lines([
        "regress: new goldens of tests that failed were not written: test_it.py::test_call, "
        "test_it.py::test_expected, test_it.py::test_refused, test_it.py::test_setup, test_it.py::test_subtest and "
        "2 more",
        "*golden update*",
        "test_it.py::test_better *x *new*",
        "test_it.py::test_good *x *new*",
        "test_it.py::test_skip *x *new*",
        "3 written: git diff shows them, git restore takes them back",
    ])  # fmt: skip


def test_the_others_are_written_when_one_test_fails(recorded: Any) -> None:
    recorded.write("test_zz.py", "def test_end(regress):\n    regress.check('z', 1)\n    assert False\n")
    before = recorded.goldens()
    result = recorded.run("--update-golden")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["12 written: git diff shows them, git restore takes them back"])
    assert changed(before, recorded.goldens()) == {f"test_{number}" for number in range(6)}


def test_a_golden_directory_that_cannot_be_written_is_told(recorded: Any, monkeypatch: Any) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == ".update":
            raise OSError(28, "No space left on device")
        return real(self, target)

    before = recorded.goldens()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        result = recorded.run("--update-golden")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([
        "regress: the update was not completed: */golden cannot be written (No space left on "
        "device), so the golden is as it was before: free space there or choose another folder",
    ])  # fmt: skip
    assert recorded.goldens() == before


def test_what_an_earlier_run_of_a_test_staged_is_forgotten(tmp_path: Path) -> None:
    first = StagedValues(tmp_path, "main", "test_it.py::test_it")
    first.put("checks/a/x.safetensors", [b"one"])
    first.put("checks/a/y.safetensors", [b"two"])
    StagedValues(tmp_path, "main", "test_it.py::test_it").put("checks/a/y.safetensors", [b"three"])
    assert staged_checks(tmp_path, ()) == {"checks/a/y.safetensors": b"three"}
    assert staged_checks(tmp_path, ["test_it.py::test_it"]) == {}


def test_workers_that_disagree_are_refused(tmp_path: Path) -> None:
    for worker, value in (("gw0", b"one"), ("gw1", b"one"), ("gw2", b"two")):
        StagedValues(tmp_path, worker, "test_it.py::test_it").put("checks/a/x.safetensors", [value])
        if worker == "gw1":
            assert staged_checks(tmp_path, ()) == {"checks/a/x.safetensors": b"one"}
    with pytest.raises(
        GoldenError, match=r"two workers ran the test of checks/a/x\.safetensors and got different"
    ):
        staged_checks(tmp_path, ())
