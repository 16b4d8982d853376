"""Process of the forkserver, as its pool sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO

from regress.errors import ReplayError
from regress.parallel.launch.reports import Ready

END = 30.0
"""Seconds until killed processes must be gone; slower ones hang in the kernel."""

_PROGRAM = """
import socket, sys
sys.path[:] = {path!r}
from regress.parallel.launch.forkserver import serve
serve(socket.socket(fileno={handle}), {modules!r})
"""


class Forkserver:
    """Process of `regress.parallel.launch.forkserver` and the socket to it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.control, other = socket.socketpair()
        self.messages = Connection(os.dup(self.control.fileno()))
        self._owner = os.getpid()
        self._ready = False
        self._closed = False
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
    def process(self) -> int:
        return self._process.pid

    def require_ready(self) -> None:
        """Wait until everything is imported; raises `ReplayError` if it cannot be."""
        if self._ready:
            return
        try:
            message = self.messages.recv()
        except (EOFError, OSError):
            message = Ready(f"the forkserver ended {self.end}")
        assert isinstance(message, Ready)
        if message.problem is not None:
            raise ReplayError(f"no ranks can be started: {message.problem}")
        self._ready = True

    @property
    def end(self) -> str:
        """Close the process, and return how it ended and its last output."""
        self.close()
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"{how} ({self._words})" if self._words else how

    def close(self) -> None:
        """End the process, and with it all ranks."""
        if self._closed:
            return
        self._closed = True
        self.messages.close()
        self.control.close()  # which it notices, and ends its ranks
        if self._owner != os.getpid():
            return
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
