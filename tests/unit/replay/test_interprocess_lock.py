"""Processes that wait for one another, and errors as one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from regress.errors import ConfigError, ReplayError
from regress.replay import interprocess_lock
from regress.replay.cpu_slots import CpuSlots


def test_a_turn_is_given_back_by_whatever_ends_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), interprocess_lock.interprocess_lock(tmp_path / "it", "it"):
        raise KeyboardInterrupt
    with interprocess_lock.interprocess_lock(tmp_path / "it", "it"):
        pass


def test_a_process_that_does_not_come_to_an_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interprocess_lock, "TIMEOUT", 0.01)
    with (
        FileLock(tmp_path / "it.lock"),
        pytest.raises(ReplayError) as error,
        interprocess_lock.interprocess_lock(tmp_path / "it", "dense/packed"),
    ):
        raise AssertionError("two had the turn")
    assert str(error.value) == (
        "dense/packed has been computed by another process for 0.01 s without an end; run it alone with -n 0 to see "
        "where it hangs"
    )


STOPS = """
import os, signal, sys
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("slots", [False, True], ids=["lock", "slots"])
def test_a_stopped_process_that_holds_what_others_wait_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: bool
) -> None:
    monkeypatch.setattr(interprocess_lock, "STANDSTILL", 0.2)
    path = tmp_path / ("0.lock" if slots else "it.lock")
    with subprocess.Popen([sys.executable, "-c", STOPS, str(path)]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        turn = CpuSlots(tmp_path, 1).taken(1, "dense/dp2") if slots else None
        with (
            pytest.raises(ReplayError) as error,
            turn or interprocess_lock.interprocess_lock(tmp_path / "it", "dense/dp2"),
        ):
            raise AssertionError("two had the turn")
        process.kill()
    assert str(error.value) == (
        f"dense/dp2 waits for another process of this run (process {process.pid}), which is stopped by a signal such "
        "as SIGSTOP: see who sent it, and run it again"
    )


def test_our_errors_are_told_as_they_are_and_others_with_their_place() -> None:
    assert interprocess_lock.stated(ConfigError("no such key")) == "no such key"
    try:
        _ = [][1]
    except IndexError as error:
        text = interprocess_lock.stated(error)
    assert text.startswith("IndexError: list index out of range, raised at ")
    assert f"{Path(__file__).name}:" in text
    assert "\n" not in interprocess_lock.stated(ValueError("a\nb"))
