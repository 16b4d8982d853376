"""Slots: never more in use than there are, whoever asks for how many, and given back by whatever ends their use."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regress.errors import ReplayError
from regress.replay import interprocess_lock
from regress.replay.cpu_slots import CpuSlots


def test_no_more_are_in_use_than_there_are(tmp_path: Path) -> None:
    used, most, lock = 0, 0, threading.Lock()

    def work(wanted: int) -> None:
        nonlocal used, most
        for _ in range(5):
            with CpuSlots(tmp_path, 3).taken(wanted, "it"):
                with lock:
                    used += min(wanted, 3)
                    most = max(most, used)
                with lock:
                    used -= min(wanted, 3)

    threads = [threading.Thread(target=work, args=(wanted,)) for wanted in (1, 2, 3, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 3


def test_two_that_fit_run_at_once(tmp_path: Path) -> None:
    with CpuSlots(tmp_path, 3).taken(2, "one"), CpuSlots(tmp_path, 3).taken(1, "another"):
        pass


def test_they_are_given_back_by_whatever_ends_their_use(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CpuSlots(tmp_path, 1).taken(1, "it"):
        raise KeyboardInterrupt
    with CpuSlots(tmp_path, 1).taken(1, "it"):
        pass


def test_a_process_that_dies_gives_them_back(tmp_path: Path) -> None:
    program = (
        "import os, pathlib\n"
        "from regress.replay.cpu_slots import CpuSlots\n"
        f"with CpuSlots(pathlib.Path({str(tmp_path)!r}), 2).taken(2, 'it'): os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with CpuSlots(tmp_path, 2).taken(2, "it"):
        pass


def test_one_that_waits_in_vain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interprocess_lock, "TIMEOUT", 0.01)
    with (
        interprocess_lock.interprocess_lock(tmp_path / "gate", "another"),
        pytest.raises(ReplayError, match=r"^dense/dp2 "),
        CpuSlots(tmp_path, 1).taken(1, "dense/dp2"),
    ):
        raise AssertionError("two had the gate")
