"""``pytest --update-golden`` on golden cases, as it is typed: in one process and spread over workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_verification import verify

pytestmark = pytest.mark.extended  # a small project has the same tests in tests/plugin

GOLDEN = Path(__file__).parents[2] / "golden"
PLUGINS = ("-p", "regress.plugin", "-p", "xdist", "-p", "no:cacheprovider", "-q")

SUITE = """
import pytest

@pytest.mark.regress(cases="dense", variants="base,mbs4")
def test_golden(regress_record):
    regress_record.check()
"""
CHANGED = """
from regress.grpo.objective_presets import PRESETS

PRESETS["grpo"]["eps"] = 1e-3
"""
DYING = """
import os

def test_dies():
    os._exit(1)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with the case `dense`, in which updates are allowed."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugins of whoever runs this
    shutil.copytree(GOLDEN / "dense", pytester.path / "golden" / "dense")
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_subprocess(*PLUGINS, "--regress-tier=semantics", *args, timeout=280)


@pytest.mark.parametrize("numbers", [("0", "2"), ("0", "2", "4")], ids=len)
def test_the_bytes_of_an_update_do_not_depend_on_the_workers(
    project: pytest.Pytester, numbers: tuple[str, ...]
) -> None:
    project.makeconftest(CHANGED)
    start = contents(project.path / "golden")
    written = []
    for workers in numbers:
        shutil.rmtree(project.path / "golden")
        shutil.copytree(GOLDEN / "dense", project.path / "golden" / "dense")
        result = run(project, "--update-golden", "-n", workers)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*golden update*", "*dense*advantages*drift*3 of 3*"])
        written.append(contents(project.path / "golden"))
    assert start not in written
    assert written == [written[0]] * len(numbers)
    assert verify(GoldenStore(project.path / "golden")) == []
    kept = {name for name in start if written[0].get(name) == start[name]}
    touched = {Path(name).name.partition(".")[0] for name in start.keys() - kept}
    assert touched & {"advantages", "gradient", "loss"} == {"advantages", "gradient", "loss"}
    assert not touched & {"batch_inputs", "weights", "old_log_probs", "ref_log_probs", "model"}
    again = run(project, "--update-golden", "-n", "0")
    assert again.ret == 0
    again.stdout.no_fnmatch_line("*golden update*")
    assert contents(project.path / "golden") == written[0]


def test_a_session_that_lost_a_worker_writes_no_case(project: pytest.Pytester) -> None:
    project.makeconftest(CHANGED)
    project.makepyfile(test_dying=DYING)
    before = contents(project.path / "golden")
    result = run(project, "--update-golden", "-n", "2")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["regress: no golden was written, because the session was interrupted: run the update again"]
    )
    assert contents(project.path / "golden") == before
