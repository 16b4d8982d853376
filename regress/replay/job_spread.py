"""Independent jobs spread over processors: this process does some of them, ranks of the pool the others."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from regress.errors import RegressError
from regress.parallel.launch.forked_rank import rank_environment
from regress.replay.cpu_slots import processors
from regress.replay.replay_pool import shared_pool

Tick = Callable[[], None]
"""Function that counts one finished replay."""
Task = Callable[[Any, Path, Tick], Any]
"""Function of a module that does a job in a folder of its own; job and result can be pickled."""

MOST = 8
"""Most processes; each holds an engine."""
_PAUSE = 0.1
"""Seconds between two looks at the progress of ranks."""


def workers() -> int:
    """Return the number of processes that jobs are spread over on this machine."""
    return min(MOST, processors())


def spread(task: Task, jobs: Sequence[Any], folder: Path, advance: Tick, processes: int = 1) -> list[Any]:
    """Run jobs and return their results, in the order of the jobs.

    Each process takes the next job that nobody has taken. What a job computes depends on no other, so the results do
    not depend on the number of processes.

    Args:
        folder: where the processes meet; each job has a folder of its own below it.
        advance: called in this process for each replay that any of them has finished.
        processes: number of processes, this one among them.

    Raises:
        RegressError: that of the first job that has one, in the order of the jobs, or of a rank that died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    progress = _Progress(folder / "progress", advance)
    ranks = min(processes, len(jobs)) - 1
    arguments = {"task": task, "jobs": list(jobs), "folder": folder}
    with _on_ranks(arguments, ranks, progress) as found:
        done = _take(task, jobs, folder, progress.tick)
    for further in found:
        done |= further
    for index in range(len(jobs)):
        if isinstance(done[index], RegressError):
            raise done[index]
    return [done[index] for index in range(len(jobs))]


class _Progress:
    """Replays that all processes have finished: one byte of a file each."""

    def __init__(self, path: Path, advance: Tick) -> None:
        self._path, self._advance, self._reported = path, advance, 0
        path.write_bytes(b"")

    def tick(self) -> None:
        _count(self._path)
        self.report()

    def report(self) -> None:
        """Report what was finished since it was last asked."""
        while self._reported < self._path.stat().st_size:
            self._reported += 1
            self._advance()


def _count(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b".")


@contextmanager
def _on_ranks(arguments: dict[str, Any], ranks: int, progress: _Progress) -> Iterator[list[dict[int, Any]]]:
    """Let ranks take jobs beside this process; their results are complete after the context."""
    found: list[dict[int, Any]] = []
    if ranks < 1:
        yield found
        return
    failed: list[BaseException] = []
    stop, given_up = Pipe()

    def run() -> None:
        try:
            found.extend(
                shared_pool().run(
                    _on_rank, arguments, ranks, timeout=math.inf, given_up=given_up, what="jobs"
                )
            )
        except BaseException as error:  # raised in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield found
    except BaseException:
        stop.send(None)
        raise
    finally:
        while thread.is_alive():
            thread.join(_PAUSE)
            progress.report()
        progress.report()
        stop.close()
        given_up.close()
    if failed:
        raise failed[0]


def _on_rank(task: Task, jobs: Sequence[Any], folder: Path) -> dict[int, Any]:
    """Take jobs on a rank, which is a process of its own to what it runs."""
    dist.destroy_process_group()
    for name in rank_environment(0, 1, 0):
        if not name.endswith("NUM_THREADS"):
            os.environ.pop(name, None)
    return _take(task, jobs, folder, lambda: _count(folder / "progress"))


def _take(task: Task, jobs: Sequence[Any], folder: Path, tick: Tick) -> dict[int, Any]:
    """Run the jobs that no other process has taken; an error that is told to the user is a result."""
    done: dict[int, Any] = {}
    for index, job in enumerate(jobs):
        place = folder / f"job{index}"
        try:
            place.mkdir()
        except FileExistsError:
            continue
        try:
            done[index] = task(job, place, tick)
        except RegressError as error:
            done[index] = error
            break  # all jobs before it are taken, and nothing after it is asked for
    return done
