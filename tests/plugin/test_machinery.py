"""Whatever befalls the processes of a session: every test says it, the next replay runs, and nothing is left behind.

Pytest runs as a process of its own on a project whose replays are jobs of the rank pool, so that it can be interrupted
and killed. The recorded values are those of `GoldenProject`; what the ranks do is what the variant is called.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import GoldenProject

TARGETS = Path(__file__).parents[1] / "unit" / "parallel" / "launch"
SOURCES = Path(__file__).parents[2]
GUARD = 400.0
"""Seconds after which something hangs; nothing here depends on how long it takes."""

pytestmark = pytest.mark.timeout(900)

CONFTEST = """
import shutil
import sys
from pathlib import Path

import pytest
import regress.replay.engine_replayer
import regress.replay.case_run
from regress.dump.dump_reader import DumpReader

sys.path.insert(0, {targets!r})
import rank_targets
import regress.replay.replay_pool
from regress.replay.replay_pool import shared_pool

# no model here
regress.replay.replay_pool.MODULES = ("torch.distributed", "regress.parallel.launch.forked_rank", "regress.dump")

HERE = Path(__file__).parent
FAULTS = {{
    "raises": (rank_targets.raises, {{"culprit": 1}}),
    "killed": (rank_targets.killed, {{"culprit": 1}}),
    "leaves": (rank_targets.leaves, {{"culprit": 0}}),
    "misses": (rank_targets.sleeps, {{"culprit": 1}}),
    "sleeps": (rank_targets.sleeps, {{"culprit": 1, "file": str(HERE / "pid")}}),
    "memory": (rank_targets.needs_memory, {{"culprit": 0}}),
    "disk": (rank_targets.writes, {{"culprit": 1, "folder": str(HERE / "full"), "limit": 1024}}),
}}


def replay(case, variant, precision, folder, **_):
    target, arguments = FAULTS.get(variant.name, (rank_targets.total, {{}}))
    patience = 1.0 if variant.name == "misses" else 60.0
    shared_pool().run(target, arguments, 2, patience=patience, what=f"{{case.name}}/{{variant.name}}")
    shutil.copytree((HERE / "made.txt").read_text(), folder / "dump", dirs_exist_ok=True)
    if variant.name == "damaged":
        path = next((folder / "dump" / "gradient").iterdir())
        path.write_bytes(path.read_bytes()[:-8])
    return DumpReader(folder / "dump")


regress.replay.engine_replayer.import_engine = lambda: None  # seconds, and only ranks compute here
regress.replay.case_run.replay = replay
"""


def interruptible() -> None:
    """Restore SIGINT, which programs that a shell starts in the background, and their children, ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Sessions:
    """Processes of pytest on a project.

    Attributes:
        project: where they run.
        temporary: their folder for temporary files.
    """

    def __init__(self, project: GoldenProject, token: str) -> None:
        self.project = project
        self.temporary = project.folder / "temporary"
        self.temporary.mkdir()
        self._token = token
        project.write("conftest.py", CONFTEST.format(targets=str(TARGETS)))

    def variants(self, *names: str) -> None:
        """Let the golden tests have these variants."""
        rows = [f'[tool.regress.variants.{name}]\nwhy = "a fault"' for name in names]
        self.project.write("pyproject.toml", "\n".join(rows))
        self.project.suite(f'variants="{",".join(names)}"')

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "TMPDIR": str(self.temporary),
            "TOKEN_OF_TEST": self._token,
        }
        command = [sys.executable, "-m", "pytest", "-p", "regress.plugin", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.project.folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=interruptible,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            printed, _ = process.communicate(timeout=GUARD)
        return process.returncode, printed

    def processes(self) -> list[int]:
        """All that descend from them and live."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self._token.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def all_gone(self) -> bool:
        """Wait until none is left."""
        return until(lambda: not self.processes())

    def folders(self) -> list[str]:
        """Return the temporary folders that are left, without those of torch itself."""
        return [path.name for path in self.temporary.iterdir() if path.name.startswith("regress")]


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + GUARD
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def sessions(stubbed: GoldenProject) -> Iterator[Sessions]:
    found = Sessions(stubbed, f"token-{os.getpid()}-{stubbed.folder.name}")
    yield found
    for process in found.processes():
        os.kill(process, signal.SIGKILL)


MESSAGES = {
    "raises": "cannot be replayed: rank 1 of 2 raised ValueError: wrong sign, before it recorded anything",
    "killed": "cannot be replayed: rank 1 of 2 was ended by SIGKILL, before it recorded anything (the kernel",
    "leaves": "cannot be replayed: rank 0 of 2 ended itself with exit code 3, before it recorded anything",
    "misses": "cannot be replayed: rank 1 of 2 hangs before it recorded anything: rank 0 waited for it in vain (",
    "memory": "cannot be replayed: rank 0 of 2 raised RuntimeError: ",
    "disk": "a limit on file sizes is in force: raise it or dump fewer types, after it recorded loss at step",
    "damaged": "bytes that do not match the size and hash in manifest.json; it was cut off or changed after it was",
}


ALONE_AND_WORKERS = [pytest.param((), id="alone"), pytest.param(("-p", "xdist", "-n2"), id="n2")]


@pytest.mark.extended
def test_faults_and_an_interrupt_fail_their_own_tests_and_leave_nothing_behind(sessions: Sessions) -> None:
    """The two tests below as one session, without workers."""
    sessions.variants(*MESSAGES, "works", "sleeps")
    with sessions.start("-rf") as process:
        assert until((sessions.project.folder / "pid1").exists)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=GUARD)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in printed
    require_told(sessions, printed)


def require_told(sessions: Sessions, printed: str) -> None:
    """All tests of each fault failed with its message, those of the sound replay passed, and nothing is left."""
    tests = sessions.project.TESTS
    assert f"{tests * len(MESSAGES)} failed, {tests} passed" in printed
    for message in MESSAGES.values():
        assert message in printed
    assert 'rank_targets.py", line ' in printed, "no remote traceback"
    assert sessions.all_gone()
    assert sessions.folders() == []


@pytest.mark.extended
@pytest.mark.parametrize("arguments", ALONE_AND_WORKERS)
def test_each_fault_fails_its_own_tests_and_the_next_replay_runs(
    sessions: Sessions, arguments: tuple[str, ...]
) -> None:
    sessions.variants(*MESSAGES, "works")
    code, printed = sessions.run("-rf", *arguments)
    assert code == 1
    require_told(sessions, printed)


@pytest.mark.extended
def test_two_sessions_at_once_do_not_meet(sessions: Sessions) -> None:
    sessions.variants("works", "raises", "well")
    with sessions.start() as first, sessions.start() as second:
        for process in (first, second):
            printed, _ = process.communicate(timeout=GUARD)
            tests = sessions.project.TESTS
            assert f"{tests} failed, {2 * tests} passed" in printed
    assert sessions.all_gone()
    assert sessions.folders() == []


@pytest.mark.extended
@pytest.mark.parametrize("arguments", ALONE_AND_WORKERS)
def test_an_interrupt_ends_all_processes(sessions: Sessions, arguments: tuple[str, ...]) -> None:
    sessions.variants("works", "sleeps")
    process = sessions.start(*arguments)
    with process:
        assert until((sessions.project.folder / "pid1").exists)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=GUARD)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in printed
    assert sessions.all_gone()
    assert sessions.folders() == []


@pytest.mark.extended
@pytest.mark.parametrize("arguments", ALONE_AND_WORKERS)
def test_the_processes_of_a_killed_session_end_and_its_folder_goes_with_the_next(
    sessions: Sessions, arguments: tuple[str, ...]
) -> None:
    sessions.variants("works", "sleeps")
    process = sessions.start(*arguments)
    with process:
        assert until((sessions.project.folder / "pid1").exists)
        process.kill()
        process.communicate(timeout=GUARD)
    assert sessions.all_gone()
    sessions.variants("works")
    code, printed = sessions.run()
    assert code == 0, printed
    assert sessions.all_gone()
    assert sessions.folders() == []
