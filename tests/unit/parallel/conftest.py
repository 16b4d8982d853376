"""Ranks that live as long as the session, and run functions of test modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests are imported by name, by ranks too

WORLD_SIZE = 4
PATIENCE = 60


class Ranks:
    """``ranks.run(function, *arguments)``: what a module-level function returns on every rank, in rank order."""

    def __init__(self, folder: Path) -> None:
        program = [sys.executable, str(Path(__file__).with_name("serving.py")), str(WORLD_SIZE), str(folder)]
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with Listener(str(folder / "socket"), family="AF_UNIX", backlog=WORLD_SIZE) as listener:
            self._process = subprocess.Popen(
                program,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            found = {}
            for _ in range(WORLD_SIZE):
                connection = listener.accept()
                found[connection.recv()] = connection
        self._connections: list[Connection[Any, Any]] = [found[rank] for rank in range(WORLD_SIZE)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        job = (function.__code__.co_filename, function.__name__, arguments)
        for connection in self._connections:
            connection.send(job)
        waiting = list(self._connections)
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(waiting, PATIENCE if all(ok for ok, _ in answers.values()) else 5)
            if not ready:
                break
            for connection in ready:
                answers[self._connections.index(connection)] = connection.recv()
                waiting.remove(connection)
        wrong = {rank: text for rank, (ok, text) in sorted(answers.items()) if not ok}
        if wrong or waiting:
            silent = [self._connections.index(connection) for connection in waiting]
            texts = "\n".join(sorted(set(wrong.values())))
            pytest.fail(
                f"ranks {sorted(wrong)} failed, ranks {silent} did not answer\n{texts}", pytrace=False
            )
        return [answers[rank][1] for rank in range(WORLD_SIZE)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        yield started
    finally:
        started.close()
