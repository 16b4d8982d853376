"""Process of the forkserver, as its pool sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import IO

from regress.errors import ReplayError
from regress.parallel.launch.job_standstill import REMEDY, STOPPED, Standstill, halted
from regress.parallel.launch.pool_messages import Ready

END = 30.0
"""Seconds until killed processes must be gone; slower ones hang in the kernel."""

_PROGRAM = """
import socket, sys
sys.path[:] = {path!r}
from regress.parallel.launch.forkserver import serve
serve(socket.socket(fileno={handle}), {modules!r})
"""


class Forkserver:
    """Process of `regress.parallel.launch.forkserver` and the socket to it.

    Attributes:
        stopped: True if a signal has stopped it for too long.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.control, other = socket.socketpair()
        self.messages = Connection(os.dup(self.control.fileno()))
        self._owner = os.getpid()
        self.stopped = self._ready = self._closed = False
        program = _PROGRAM.format(path=sys.path, handle=other.fileno(), modules=list(modules))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=[other.fileno()],
                start_new_session=True,  # an interrupt of this process does not reach it
                env=environment,
            )

    @property
    def is_own(self) -> bool:
        """True if this process has started it, and is not a copy of the one that has."""
        return self._owner == os.getpid()

    @property
    def process(self) -> int:
        return self._process.pid

    def wait(self, standstill: Standstill) -> None:
        """Wait until it has imported everything and runs, or was stopped for too long; raises `ReplayError` if it
        cannot import something.
        """
        while not self.stopped and (halted(self.process) or not self._ready):
            if self.messages.poll(standstill.pause) and not self._ready:
                self._receive_ready()
            self.look(standstill)

    def look(self, standstill: Standstill, ranks: Collection[int] = ()) -> int | None:
        """Inspect this process and those of ranks, as `Standstill.look` does."""
        found = standstill.look([*ranks, self.process])
        self.stopped = found == self.process
        return found

    def _receive_ready(self) -> None:
        try:
            message = self.messages.recv()
        except (EOFError, OSError):
            message = Ready(f"the forkserver {self.end}")
        assert isinstance(message, Ready)
        if message.problem is not None:
            raise ReplayError(f"no ranks can be started: {message.problem}")
        self._ready = True

    @property
    def end(self) -> str:
        """Close the process, and return what became of it, with its last output."""
        self.close()
        if self.stopped:
            return f"(process {self.process}) {STOPPED}: {REMEDY}"
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"ended {how}{f' ({self._words})' if self._words else ''}; run it again"

    def close(self) -> None:
        """End the process, and with it all ranks."""
        if self._closed:
            return
        self._closed = True
        self.messages.close()
        self.control.close()  # which it notices, and ends its ranks
        if not self.is_own:
            return
        self._process.send_signal(signal.SIGCONT)  # stopped, it would not notice
        try:
            self._process.wait(END if self._ready else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words = " ".join(read(self._printed)[-300:].split())
        self._printed.close()


def read(file: IO[bytes]) -> str:
    """Return all that was printed to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")
