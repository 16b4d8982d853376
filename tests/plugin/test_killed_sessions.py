"""`pytest -n 2 --update-golden` killed by SIGKILL: its cases and its checks are all old, or all new."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regress.durable_files import unfinished
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_verification import verify

SOURCES = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)

KILLER = """
import os
import signal
from pathlib import Path

import pytest

MOMENT = {moment!r}
ended = []


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def at_replace(true):
    real = Path.replace

    def replace(self, target):
        if ended and true(self, Path(target)):
            kill()
        return real(self, target)

    Path.replace = replace


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    if MOMENT == "laid":
        at_replace(lambda path, target: target.name == ".update")
    elif MOMENT == "first":
        at_replace(lambda path, target: ".update" in path.parts)
    elif MOMENT == "manifest":
        at_replace(lambda path, target: target.name == "manifest.json")
    elif MOMENT == "end":
        import shutil

        real = shutil.rmtree

        def rmtree(path, *arguments, **options):
            if Path(path).name == ".partial-update" and ended:
                kill()
            return real(path, *arguments, **options)

        shutil.rmtree = rmtree


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    ended.append(True)


def pytest_runtest_logreport(report):
    if MOMENT == "tests" and report.nodeid.endswith("test_b") and report.when == "teardown":
        kill()
"""
CHECKS = """
def test_a(regress):
    regress.check("x", {0})
    regress.check("y", [{0}, 2])

def test_b(regress):
    regress.check("x", {0})
"""


def state(root: Path) -> tuple[dict[str, bytes], set[str]]:
    """The stored checks, and the golden advantages of the case, by the names that their content gives them."""
    manifest = GoldenStore(root).case("dr_grpo").manifest  # opened first: that finishes an update
    checks = {path.name: path.read_bytes() for path in (root / "checks").rglob("*") if path.is_file()}
    assert manifest is not None
    return checks, {row["advantages"].stamp.sha256 for row in manifest.truth.values()}


def killed(folder: Path, *arguments: str) -> None:
    """Run pytest on two workers, which kills itself."""
    command = [sys.executable, "-m", "pytest", "-p", "regress.plugin", "-p", "killer", "-p", "xdist", "-n2"]
    path = os.pathsep.join([str(SOURCES), str(folder)])
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.wait(timeout=800) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers


@pytest.mark.parametrize(
    ("moment", "new"),
    [
        pytest.param("tests", False, marks=pytest.mark.extended),
        pytest.param("laid", False, marks=pytest.mark.extended),
        pytest.param("first", True, marks=pytest.mark.extended),
        pytest.param("manifest", True, marks=pytest.mark.extended),
        pytest.param("end", True, marks=pytest.mark.extended),
    ],
)
def test_a_killed_session_leaves_all_old_or_all_new(stubbed: Any, moment: str, new: bool) -> None:
    stubbed.write("test_checks.py", CHECKS.format(1.5))
    stubbed.passes("--update-golden", "test_checks.py", count=2)
    root = stubbed.folder / "golden"
    before, files = state(root), stubbed.goldens()
    stubbed.write("test_checks.py", CHECKS.format(2.5))
    stubbed.write("killer.py", KILLER.format(moment=moment))
    stubbed.fault(base={"type": "is_loss_debug", "tensor": "advantages", "factor": 1.001})
    killed(stubbed.folder, "--update-golden", "--regress-tier=semantics", "-k", "/advantages or test_checks")
    after = state(root)  # opens it
    assert not unfinished(root)
    assert [found for found in verify(GoldenStore(root)) if found.damage] == []
    if new:
        assert all(after[0][name] != before[0][name] for name in before[0])
        assert after[0].keys() == before[0].keys()
        assert not after[1] & before[1]
    else:
        assert stubbed.goldens() == files
