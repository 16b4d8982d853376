"""A pool whose process is copied, ended or interrupted, or whose forkserver dies, leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regress.errors import ReplayError
from regress.parallel.launch.rank_pool import RankPool
from tests.unit.parallel.launch.awaited import GUARD, appears, gone

HERE = Path(__file__).parent


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_copies_of_a_process_whose_forkserver_imports_run_jobs_too(targets: Any) -> None:
    """All of them waited for the one message that tells when it is ready."""
    with RankPool(("torch", "regress.parallel.launch.forked_rank")) as pool:
        pool.warm()
        copies = []
        for _ in range(2):
            copy = os.fork()
            if copy == 0:
                try:
                    os._exit(0 if pool.run(targets.total, {}, 2) == [3.0, 3.0] else 1)
                finally:
                    os._exit(2)
            copies.append(copy)
        ended = [gone(copy) for copy in copies]
        for copy in copies:
            os.kill(copy, signal.SIGKILL)
        assert ended == [True, True]
        assert [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies] == [0, 0]
        assert pool.run(targets.total, {}, 2) == [3.0, 3.0]


@pytest.mark.extended
def test_a_forkserver_that_dies_takes_its_ranks_along_and_another_takes_its_place(
    targets: Any, tmp_path: Path
) -> None:
    import threading

    with RankPool(("torch", "regress.parallel.launch.forked_rank")) as pool:
        assert pool.run(targets.total, {}, 1) == [1.0]
        server = pool.process
        assert server is not None

        def kill() -> None:
            assert appears(tmp_path / "pid0")
            os.kill(server, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(
            ReplayError, match=r"^the forkserver of the ranks ended by SIGKILL; run it again$"
        ):
            pool.run(targets.sleeps, {"culprit": 0, "file": str(tmp_path / "pid")}, 1)
        killer.join()
        assert gone(int((tmp_path / "pid0").read_text()))
        assert pool.run(targets.total, {}, 2) == [3.0, 3.0]


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import rank_targets
from regress.parallel.launch.rank_pool import RankPool
pool = RankPool(("torch", "regress.parallel.launch.forked_rank"))
print("starts", flush=True)
try:
    pool.run(rank_targets.sleeps, {{"culprit": 1, "file": {file!r}}}, 2)
except KeyboardInterrupt:
    print("interrupted", pool.run(rank_targets.total, {{}}, 2), flush=True)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_process_that_asked_for_them(tmp_path: Path, number: int) -> None:
    program = PROGRAM.format(here=str(HERE), file=str(tmp_path / "pid"))
    command = [sys.executable, "-c", program]

    def interruptible() -> None:
        """Restore SIGINT, which programs that a shell starts in the background, and their children, ignore."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible) as process:
        assert appears(tmp_path / "pid0")
        assert appears(tmp_path / "pid1")
        process.send_signal(number)
        printed, _ = process.communicate(timeout=GUARD)
    assert ("interrupted [3.0, 3.0]" in printed) == (number == signal.SIGINT)
    for rank in range(2):
        assert gone(int((tmp_path / f"pid{rank}").read_text()))
