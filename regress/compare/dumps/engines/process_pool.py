"""Processes of this machine; a process that dies costs time but no result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from regress.compare.dumps.comparison import Job, work
from regress.compare.dumps.engines.executor_warning import warn
from regress.compare.dumps.scaled_verdicts import Finding
from regress.errors import reason

ALONE = 1.0
"""Seconds for which this process works alone: others take about as long to start, and most comparisons end before."""
AHEAD = 4
"""Jobs in hand for each worker, done or not, which limits the results that wait for their turn."""
PATIENCE = 3
"""Number of pools that may break in a row without a result; then no more are started."""


@dataclass(frozen=True)
class Processes:
    """An engine: this process at first, and others with it when there is more to do.

    Attributes:
        workers: number of processes; by default one for each processor that this process may use.
        notify: called with a sentence on processes that died.
        alone: seconds until others are started.
    """

    workers: int | None = None
    notify: Callable[[str], None] = warn
    alone: float = ALONE

    def __call__(self, jobs: Sequence[Job]) -> Iterator[list[Finding]]:
        """Yield the results of the jobs, in their order."""
        workers = self.workers or len(os.sched_getaffinity(0))
        start = time.monotonic()
        for index, job in enumerate(jobs):
            left = len(jobs) - index
            if min(workers, left) > 1 and time.monotonic() - start >= self.alone:
                yield from _spread(jobs[index:], min(workers, left), self.notify)
                return
            yield work(job)


def _spread(jobs: Sequence[Job], workers: int, notify: Callable[[str], None]) -> Iterator[list[Finding]]:
    pool = _Pool(workers, notify)
    try:
        for job in jobs:
            pool.put(job)
            if pool.full:
                yield pool.get()
        while pool.waiting:
            yield pool.get()
    finally:
        pool.close()


class _Pool:
    """Jobs in hand, in order, and the processes that do them.

    Attributes:
        waiting: jobs whose results were not taken yet.
    """

    def __init__(self, workers: int, notify: Callable[[str], None]) -> None:
        self.waiting: deque[tuple[Job, Future[list[Finding]]]] = deque()
        self._workers = workers
        self._tell = notify
        self._broken = 0  # pools, since the last result
        self._pool: ProcessPoolExecutor | None = self._started()

    @property
    def full(self) -> bool:
        """True if a result should be taken before another job is put."""
        return len(self.waiting) >= AHEAD * self._workers

    def put(self, job: Job) -> None:
        """Queue a job."""
        self.waiting.append((job, self._submitted(job)))

    def get(self) -> list[Finding]:
        """Return the result of the first job that waits; raises what the job raised."""
        job, future = self.waiting.popleft()
        try:
            found = future.result()
        except BrokenProcessPool:
            return self._again(job)
        self._broken = 0
        return found

    def close(self) -> None:
        """Shut the processes down after their current jobs."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _again(self, first: Job) -> list[Finding]:
        """Run a job again, and resubmit all others whose results were lost."""
        self.close()
        self._broken += 1
        self._pool = self._started() if self._broken < PATIENCE else None
        for _ in range(len(self.waiting)):
            job, future = self.waiting.popleft()
            self.waiting.append((job, self._submitted(job) if _lost(future) else future))
        if self._broken == 1:
            self._tell("a worker process died, perhaps of too little memory: what it compared is done anew")
            self.waiting.appendleft((first, self._submitted(first)))
            return self.get()
        rest = "all that is left" if self._pool is None else "the comparison that it was at"
        self._tell(f"a worker process died again: {rest} is done by this process")
        return work(first)

    def _submitted(self, job: Job) -> Future[list[Finding]]:
        if self._pool is None:
            return _Here(job)
        try:
            return self._pool.submit(work, job)
        except (BrokenProcessPool, OSError) as error:
            future: Future[list[Finding]] = Future()
            future.set_exception(BrokenProcessPool(reason(error)))
            return future

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["regress.compare.dumps.comparison"])
        return ProcessPoolExecutor(self._workers, context, _stay_with_owner)


class _Here(Future[list[Finding]]):
    """A job that this process runs when its result is asked for."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def result(self, timeout: float | None = None) -> list[Finding]:
        """Run the job and return its result."""
        return work(self._job)


def _lost(future: Future[list[Finding]]) -> bool:
    """Return True if a job of a closed pool has to run again."""
    return not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool)


def _stay_with_owner() -> None:
    """Ignore interrupts in a new process, which the owner handles, and exit when the owner exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    assert owner is not None, "the main process is not a worker"

    def watch() -> None:
        owner.join()
        os._exit(1)

    threading.Thread(target=watch, name="regress-compare-owner", daemon=True).start()
