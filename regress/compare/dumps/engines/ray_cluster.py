"""Tasks on Ray: the nodes of a cluster read the dumps themselves, and send verdicts back."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from regress.compare.dumps.comparison import Job, work
from regress.compare.dumps.engines.executor_warning import warn
from regress.compare.dumps.engines.process_pool import AHEAD, PATIENCE
from regress.compare.dumps.opened_dump import close_sides, open_side
from regress.compare.dumps.scaled_verdicts import Finding
from regress.dump.dump_location import is_remote, local_path
from regress.errors import CompareError, DumpError, reason
from regress.optional_packages import install

if TYPE_CHECKING:
    from types import ModuleType

ADDRESS = "RAY_ADDRESS"
"""Environment variable by which Ray, too, finds a cluster."""
REACHED = 10.0
"""Seconds within which a cluster has to accept a connection; Ray itself would wait for minutes."""


@dataclass(frozen=True)
class Cluster:
    """An engine: tasks on an existing cluster, or on one that is started on this machine and ends with the work.

    Attributes:
        workers: tasks at a time; by default as many as the cluster has processors.
        address: address of an existing cluster: ``HOST:PORT``, ``ray://HOST:PORT`` or ``auto``.
        notify: called with a sentence on tasks that failed there.
    """

    workers: int | None = None
    address: str | None = None
    notify: Callable[[str], None] = warn

    def __call__(self, jobs: Sequence[Job]) -> Iterator[list[Finding]]:
        """Yield the results of the jobs, in their order."""
        if not jobs:
            return
        with self._connected() as ray:
            # a worker that dies is not a fault of the task, which is given to another one
            task = ray.remote(max_retries=PATIENCE)(work_there)
            session, ahead = uuid4().hex, self._ahead(ray)
            waiting: deque[tuple[Job, Any]] = deque()
            for job in jobs:
                waiting.append((job, task.remote(session, _anywhere(job))))
                if len(waiting) >= ahead:
                    yield self._result(ray, *waiting.popleft())
            while waiting:
                yield self._result(ray, *waiting.popleft())

    def _ahead(self, ray: ModuleType) -> int:
        if self.workers is not None and self._existing is not None:
            return self.workers
        return AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def _result(self, ray: ModuleType, job: Job, promise: Any) -> list[Finding]:
        try:
            found: list[Finding] = ray.get(promise)
        except ray.exceptions.RayTaskError as error:
            raise _cause(ray, error) from None
        except ray.exceptions.RayError as error:
            self.notify(
                f"a task on Ray failed {PATIENCE + 1} times ({reason(error)}): this process does its comparison"
            )
            return work(job)
        return found

    @property
    def _existing(self) -> str | None:
        return self.address or os.environ.get(ADDRESS) or None

    @contextmanager
    def _connected(self) -> Iterator[ModuleType]:
        """Connect to Ray inside; a connection that somebody else has made is used and left open."""
        ray = imported()
        if ray.is_initialized():
            yield ray
            return
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        address = self._existing
        try:
            if address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                ray.init(address="local", num_cpus=self.workers, include_dashboard=False, **quiet)
            else:
                _require_answer(address)
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = (
                "no local Ray cluster can be started" if address is None else f"no Ray cluster at {address}"
            )
            raise CompareError(
                f"{where} ({reason(error)}): check --ray-address and {ADDRESS}, or compare with --engine processes"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


def imported() -> ModuleType:
    """Import Ray; raise `CompareError` telling how to install it if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise CompareError(f"""the engine ray needs the package ray ({reason(error)}): run {install("ray")}, or compare
        with --engine processes""") from None
    module: ModuleType = ray
    return module


def work_there(session: str, job: Job) -> list[Finding]:
    """Run one job on some node, which has to see both dumps.

    Raises:
        CompareError: naming the node if it does not.
    """
    global _session
    if session != _session:
        close_sides()  # dumps may have changed since an earlier comparison
        _session = session
    for path in (job[0].golden, job[0].actual):
        try:
            open_side(path)
        except DumpError as error:
            raise CompareError(f"""the Ray node {socket.gethostname()} cannot read {path} ({error}): every node reads
            the dumps itself, so put them where all nodes see them under the same path, or into a store and give its
            URL""") from None
    return work(job)


_session = ""


def _anywhere(job: Job) -> Job:
    """Return a job whose paths mean the same in every working directory."""
    unit, scales = job
    golden, actual = (
        path if is_remote(path) else str(Path(local_path(path)).absolute())
        for path in map(str, (unit.golden, unit.actual))
    )
    return replace(unit, golden=golden, actual=actual), scales


def _cause(ray: ModuleType, error: Any) -> BaseException:
    """Return the error that a task raised, unwrapped from Ray's."""
    cause = error.cause
    if isinstance(cause, ImportError | ray.exceptions.RayError):
        return CompareError(
            f"a Ray node cannot take up this work ({reason(cause)}): install the same grpo-regress on all nodes"
        )
    return cause if isinstance(cause, BaseException) else error


def _require_answer(address: str) -> None:
    """Raise `OSError` if nothing accepts a connection at ``HOST:PORT``; other addresses are for Ray to judge."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACHED).close()
