"""Pool of cheap ranks: fresh processes, forked for each job from one that has imported everything.

A job is a function that every rank runs, in a process group of its own. Nothing of it outlives it: however it ends, its
processes are gone when `RankPool.run` returns or raises, and the pool serves the next.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from regress.errors import ReplayError
from regress.parallel.launch.forkserver_process import END, Forkserver, read
from regress.parallel.launch.job_failure import RankState, rank_failure
from regress.parallel.launch.job_standstill import STANDSTILL, Standstill
from regress.parallel.launch.pool_messages import Done, Ended, Failed, Forked, Signal, Start, Tapped

TIMEOUT = 300.0
"""Seconds after which a job is given up."""

PATIENCE = 120.0
"""Seconds that a rank waits for others in a collective."""

_GRACE = 1.0
"""Seconds that the other ranks have to report, once one has failed."""

_STACKS = 0.3
"""Seconds to print the stacks of ranks that hang."""


class RankPool:
    """Runs jobs of several ranks, one after another.

    The forkserver starts with the first job, or with `warm`, and takes some seconds to import its modules; each job
    after that has its ranks in milliseconds. A copy of this process (``os.fork``) starts one of its own.

    Args:
        modules: modules that are imported before the ranks are forked.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._server: Forkserver | None = None
        self._lock = threading.Lock()

    @property
    def process(self) -> int | None:
        """Process id of the forkserver, None when there is none."""
        return None if self._server is None else self._server.process

    def warm(self) -> None:
        """Make the forkserver import its modules in the background."""
        with self._lock:
            self._started()

    def run(
        self,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        world_size: int,
        *,
        timeout: float | None = None,
        standstill: float = STANDSTILL,
        patience: float = PATIENCE,
        backend: str = "gloo",
        folder: Path | None = None,
        what: str = "",
        given_up: Connection | None = None,
    ) -> list[Any]:
        """Run a function on every rank.

        Args:
            target: a function of a module, which the ranks import; it finds the default process group initialized, one
                thread, the environment and the working directory of this process, and the variables of torchrun.
            arguments: its keyword arguments, which are pickled.
            world_size: number of ranks.
            timeout: seconds that the job may take, by default `TIMEOUT` or five times ``standstill``; ``math.inf`` for
                as long as its ranks want, which may then wait for others than one another.
            standstill: seconds after which it is given up if a rank or the forkserver is stopped or, unless ``timeout``
                is infinite, no rank does anything.
            patience: seconds that a collective may take.
            backend: backend of the process group.
            folder: keeps what each rank prints, as ``rank0.log``; nowhere by default.
            what: name of the job in errors.
            given_up: once something can be read from it, the job is given up as after ``timeout`` seconds.

        Returns:
            What the ranks return, by rank.

        Raises:
            RankError: naming the rank that raised, died, or hangs; its notes are the traceback and what it printed.
            ReplayError: if no ranks can be started, or the forkserver ends or is stopped.
        """
        if target.__module__ == "__main__":
            raise ValueError(
                f"{target.__qualname__} is not a function of a module that ranks can import: move it"
            )
        timeout = max(TIMEOUT, 5 * standstill) if timeout is None else timeout
        payload = pickle.dumps((target, dict(arguments)))
        directory, path = os.getcwd(), tuple(sys.path)  # noqa: PTH109  # text, as it is sent
        start = Start(world_size, payload, dict(os.environ), path, directory, backend, patience)
        with self._lock, ExitStack() as resources:
            judge = Standstill(standstill, idle=not math.isinf(timeout))
            job = _Job(self._started(), start, _logs(folder, world_size, resources), resources, judge)
            try:
                job.start()
                job.wait(timeout, given_up)
            finally:
                self._end(job)
            return job.values(what, timeout, standstill)

    def close(self) -> None:
        """End the forkserver; another job starts a new one."""
        with self._lock:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Forkserver:
        if self._server is None or not self._server.is_own:
            self._server = Forkserver(self._modules)
            weakref.finalize(self, self._server.close)  # also at the end of the interpreter
        return self._server

    def _end(self, job: _Job) -> None:
        """End a job; if that fails, end the forkserver and all processes of the job with it."""
        try:
            job.end()
        except BaseException:
            self._close()
            raise
        if job.lost:
            self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Job:
    """One job of a pool, from its start until all of its processes are gone.

    Attributes:
        states: state of each rank.
        lost: True if the forkserver is gone.
        still: True if no rank did anything.
    """

    def __init__(
        self,
        server: Forkserver,
        start: Start,
        logs: list[IO[bytes]],
        resources: ExitStack,
        standstill: Standstill,
    ) -> None:
        self.states = [RankState(rank) for rank in range(start.world_size)]
        self.lost = self.still = False
        self._server, self._start, self._logs, self._standstill = server, start, logs, standstill
        self._reports: dict[Connection, RankState] = {}
        self._resources = resources
        self._started = False
        self._given_up: Connection | None = None

    def start(self) -> None:
        """Fork the ranks, unless the forkserver is lost."""
        self.lost = True
        self._server.wait(self._standstill)
        self.lost = self._server.stopped
        if self.lost:
            return
        self._standstill.moved()
        handles, writers = [], []
        for state, log in zip(self.states, self._logs, strict=True):
            reader, writer = Pipe(duplex=False)
            self._reports[self._resources.enter_context(reader)] = state
            writers.append(writer)
            handles += [writer.fileno(), log.fileno()]
        self._started = True
        try:
            self._server.messages.send(self._start)
            socket.send_fds(self._server.control, [b"F"], handles)
        except OSError:
            self.lost = True
        finally:
            for writer in writers:
                writer.close()

    def wait(self, timeout: float, given_up: Connection | None) -> None:
        """Wait until every rank is done, or one has failed and the others had time to report, or nothing goes on."""
        end = time.monotonic() + timeout
        self._given_up = given_up
        while not self._failed and not self._all(lambda state: state.result is not None):
            if self._take(min(end, self._standstill.due)):
                self._standstill.moved()
            elif time.monotonic() >= end or (given_up is not None and given_up.poll()):
                break
            if self._stands():
                break
        self._given_up = None
        end = min(end, time.monotonic() + _GRACE)
        while self._failed and not self._all(lambda state: not state.runs) and self._take(end):
            pass
        hanging = [state for state in self.states if state.runs]
        if hanging and not self.lost:
            self._signal(signal.SIGUSR1, hanging)
            end = time.monotonic() + _STACKS
            while self._take(end):
                pass

    def _stands(self) -> bool:
        ranks = {state.process: state for state in self.states if state.process is not None and state.runs}
        found = self._server.look(self._standstill, ranks)
        self.lost = self.lost or self._server.stopped
        self.still = found == 0
        if found in ranks:
            ranks[found].stopped = True
        return found is not None

    def end(self) -> None:
        """End every rank, and wait until all are gone."""
        if not self._started or self.lost:
            return
        self._signal(signal.SIGKILL, [state for state in self.states if state.status is None])
        end = time.monotonic() + END
        while not self.lost and not self._all(lambda state: state.status is not None):
            if not self._take(min(end, self._standstill.due)):
                self._server.look(self._standstill)
                self.lost = self.lost or self._server.stopped or time.monotonic() >= end

    def values(self, what: str, timeout: float, standstill: float) -> list[Any]:
        """Return the values of the ranks; raises `RankError` unless all have returned."""
        if self.lost:
            head = f"{what}: " if what else ""
            raise ReplayError(f"{head}the forkserver of the ranks {self._server.end}")
        results = [state.result.value for state in self.states if isinstance(state.result, Done)]
        if len(results) == len(self.states) and not any(state.died for state in self.states):
            return results
        limit = f"after {timeout:g} s {{}} had not come to an end"
        if self.still:
            limit = f"for {standstill:g} s {{}} did nothing (parallel.timeout sets the seconds)"
        raise rank_failure(self.states, [read(log) for log in self._logs], what, limit)

    @property
    def _failed(self) -> bool:
        return self.lost or any(state.died or isinstance(state.result, Failed) for state in self.states)

    def _all(self, holds: Callable[[RankState], bool]) -> bool:
        return all(holds(state) for state in self.states)

    def _take(self, end: float) -> bool:
        """Receive the next reports of ranks and forkserver; False if nothing came until ``end``, the job is given
        up, or nobody is left to report.
        """
        if self.lost:
            return False
        others = [] if self._given_up is None else [self._given_up]
        rest = None if math.isinf(end) else max(0.0, end - time.monotonic())
        ready = wait([self._server.messages, *self._reports, *others], rest)
        if self._given_up in ready:
            return False
        for source in sorted(
            ready, key=lambda source: source is self._server.messages
        ):  # what ends ranks comes last
            if isinstance(source, Connection):
                self._hear(source)
        return bool(ready)

    def _hear(self, source: Connection) -> None:
        try:
            message = source.recv()
        except (EOFError, OSError):
            if source is self._server.messages:
                self.lost = True
            else:
                del self._reports[source]
            return
        if isinstance(message, Ended):
            self._hear_out(message.rank)
            self.states[message.rank].status = message.status
            self.states[message.rank].ended = time.monotonic()
        elif isinstance(message, Forked):
            self.states[message.rank].process = message.process
        elif isinstance(message, Tapped):
            self._reports[source].last = message
        elif isinstance(message, Done | Failed):
            self._reports[source].result = message

    def _hear_out(self, rank: int) -> None:
        """Receive everything that a rank reported before its end, which would otherwise look like an end
        without a report.
        """
        for report in [report for report, state in self._reports.items() if state.rank == rank]:
            while report in self._reports and report.poll():
                self._hear(report)

    def _signal(self, number: int, states: Sequence[RankState]) -> None:
        for state in states:
            state.slain = True
        try:
            self._server.messages.send(Signal(number, tuple(state.rank for state in states)))
        except OSError:
            self.lost = True


def _logs(folder: Path | None, world_size: int, resources: ExitStack) -> list[IO[bytes]]:
    """Open a file for the output of each rank, for appending, as two streams of the rank share it."""
    if folder is None:
        return [resources.enter_context(tempfile.TemporaryFile("a+b")) for _ in range(world_size)]
    folder.mkdir(parents=True, exist_ok=True)
    return [resources.enter_context((folder / f"rank{rank}.log").open("w+b")) for rank in range(world_size)]
