"""Process that forks ranks: it has imported everything, computes nothing, and has one thread.

    python -c '...' runs serve(socket, modules)

Unlike the forkserver of `multiprocessing`, it serves a pool of ranks: ranks do not import the main module of
the requesting process again, each gets the current environment and working directory of that process,
everything that a rank has started ends with it, and everything ends when the other end of the socket is
closed, however that process ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
from collections.abc import Iterable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from regress.errors import reason
from regress.parallel.launch.forkserver_imports import imported_for_good
from regress.parallel.launch.pool_messages import Ended, Forked, Ready, Signal, Start

_PR_SET_PDEATHSIG = 1


def serve(control: socket.socket, modules: Iterable[str]) -> None:
    """Import ``modules``, then fork ranks as asked through ``control`` until its other end is closed."""
    server = _Server(control)
    try:
        with imported_for_good():
            problem = _imported(modules)
        server.answer(Ready(problem))
        while problem is None:
            server.turn()
    except (EOFError, ConnectionError):
        pass
    finally:
        server.kill()


def _imported(modules: Iterable[str]) -> str | None:
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # the pool reports any error
            return f"{name} cannot be imported ({reason(error)})"
    return None


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._messages = Connection(os.dup(control.fileno()))
        self._ranks: dict[int, int] = {}
        """Process id -> rank, of those that have not ended."""
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides what an interrupt ends

    def answer(self, message: object) -> None:
        self._messages.send(message)

    def turn(self) -> None:
        """Wait for a message or the end of a rank; raises `EOFError` when the pool is gone."""
        control = self._control.fileno()
        ready, _, _ = select.select([control, self._woken], [], [])
        if self._woken in ready:
            os.read(self._woken, 4096)
            self._reap()
        if control in ready:
            message = self._messages.recv()
            if isinstance(message, Start):
                self._start(message)
            elif isinstance(message, Signal):
                self._signal(message)

    def kill(self) -> None:
        """End all ranks and what they have started."""
        for process in self._ranks:
            _kill_group(process, signal.SIGKILL)

    def _start(self, job: Start) -> None:
        count = 2 * job.world_size
        _, handles, _, _ = socket.recv_fds(self._control, 1, count)
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, job.world_size))
        try:
            for rank in range(job.world_size):
                process = os.fork()
                if process == 0:
                    self._become_rank(job, rank, handles, listener)
                self._ranks[process] = rank
                self.answer(Forked(rank, process))
        finally:
            listener.close()
            for handle in handles:
                os.close(handle)

    def _become_rank(self, job: Start, rank: int, handles: list[int], listener: socket.socket) -> NoReturn:
        """Release, in the forked process, everything that belongs to the server."""
        try:
            parent = os.getppid()
            os.setsid()  # a group of its own, so that all that it starts can be ended with it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._messages.close()
            for handle in (self._control.detach(), self._woken, self._wakes):
                os.close(handle)
            report, log = handles[2 * rank : 2 * rank + 2]
            for handle in {*handles} - {report, log}:
                os.close(handle)
            from regress.parallel.launch.forked_rank import run_rank

            run_rank(job, rank, Connection(report, readable=False), log, listener)
        finally:
            os._exit(1)  # never back into the server

    def _reap(self) -> None:
        for process, rank in list(self._ranks.items()):
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            _kill_group(process, signal.SIGKILL)  # its id is still taken, so no other process is hit
            _, status = os.waitpid(process, 0)
            del self._ranks[process]
            self.answer(Ended(rank, os.waitstatus_to_exitcode(status)))

    def _signal(self, message: Signal) -> None:
        for process, rank in self._ranks.items():
            if rank in message.ranks:
                if message.number == signal.SIGKILL:
                    _kill_group(process, message.number)
                else:
                    os.kill(process, message.number)


def _kill_group(process: int, number: int) -> None:
    """Signal a rank that was not waited for and its process group, which it creates right after the fork."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:
        os.kill(process, number)
