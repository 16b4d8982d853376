"""Host on ranks of its own, long-lived processes that the service starts and starts again."""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from regress.errors import RankError, RegressError
from regress.parallel.launch.rank_pool import RankPool
from regress.service.core.host_executor import HostCall, HostLostError, OpenHost
from regress.service.core.rank_loop import Answer, agreed, named, serve_rank
from regress.service.service_api import ServiceError

MODULES = (
    "torch",
    "torch.distributed",
    "regress.parallel.launch.forked_rank",
    "regress.service.core.rank_loop",
)
"""Modules that ranks need, imported once before they are forked."""

_START = 300.0
"""Seconds in which all ranks must have opened their hosts."""
_END = 60.0
"""Seconds in which the pool must have ended its ranks."""
_ERRED = 30.0
"""Seconds that the other ranks have to answer once one has failed."""
_COLLECTIVE = "torch/distributed/distributed_c10d.py"


class RankExecutor:
    """Calls the methods of hosts on several ranks.

    Args:
        open_host: opens the host of a rank, which finds the default process group initialized.
        world_size: number of ranks.
        modules: modules that are imported before the ranks are forked.
        patience: seconds that a collective may take.
        backend: backend of the process group.
    """

    def __init__(
        self,
        open_host: OpenHost,
        world_size: int,
        *,
        modules: Sequence[str] = MODULES,
        patience: float = 1800.0,
        backend: str = "gloo",
    ) -> None:
        self.world_size = world_size
        self._open_host = open_host
        self._settings = {"patience": patience, "backend": backend}
        self._pool = RankPool(modules)
        self._ranks: _Ranks | None = None

    def start(self) -> None:
        """Start the ranks; raises `ServiceError` naming the rank that cannot open its host."""
        self._ranks = _Ranks(self._pool, self._open_host, self.world_size, self._settings)
        try:
            self._ranks.connect()
        except BaseException:
            self._end()
            raise

    def call(self, call: HostCall, timeout: float) -> Any:
        """Return the result of a call on all ranks, that of the first."""
        if self._ranks is None:
            raise HostLostError("the ranks are not running", code="rank_failed", category="server")
        return agreed(self._ranks.answers(call, timeout), call)

    def restart(self) -> None:
        """End the ranks, however they are, and start others."""
        self._end()
        self.start()

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.dismiss()
        self._end()
        self._pool.close()

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None


class _Ranks:
    """Ranks of one job of the pool, and the connections to them."""

    def __init__(
        self, pool: RankPool, open_host: OpenHost, world_size: int, chosen: Mapping[str, Any]
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="regress-ranks-"))  # for this user alone
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen(world_size)
        self._given_up, self._give_up = Pipe(duplex=False)
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._world_size = world_size
        self._job: Future[None] = Future()
        arguments = {"address": str(self._folder / "socket"), "open_host": open_host}
        run = {"timeout": math.inf, "folder": self._folder / "logs", "given_up": self._given_up, **chosen}
        threading.Thread(target=self._run, args=[pool, arguments, run], daemon=True).start()

    def connect(self) -> None:
        """Wait for all ranks; raises `ServiceError` if they do not come."""
        self._listener.settimeout(0.2)
        accepted: list[Connection[Any, Any]] = []
        end = time.monotonic() + _START
        while len(self._connections) < self._world_size:
            with suppress(TimeoutError):
                connected, _ = self._listener.accept()
                accepted.append(Connection(connected.detach()))
            for connection in wait(accepted, 0.01):
                assert isinstance(connection, Connection)
                accepted.remove(connection)
                with suppress(EOFError, OSError):
                    self._connections[connection.recv()] = connection
            if self._job.done() or time.monotonic() > end:
                raise ServiceError(
                    f"the ranks of the service do not start: {self._failure(f'not within {_START:g} s')}",
                    code="rank_failed",
                    category="server",
                )

    def answers(self, call: HostCall, timeout: float) -> list[Answer]:
        """Return the answers of all ranks to a call; raises `HostLostError` naming a rank that gives none."""
        found: dict[int, Answer] = {}
        self._broadcast(call)
        begin = time.monotonic()
        end = begin + timeout
        while len(found) < self._world_size:
            silent = {connection: rank for rank, connection in self._connections.items() if rank not in found}
            ready = wait(silent, max(0.0, end - time.monotonic()))
            if not ready:
                raise self._hung(sorted(silent.values()), call, time.monotonic() - begin)
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    raise self._lost(silent[connection], call) from None
                found[silent[connection]] = answer
                if answer.error is not None:
                    end = min(end, time.monotonic() + _ERRED)
        return [found[rank] for rank in range(self._world_size)]

    def dismiss(self) -> None:
        """Have the ranks end by themselves."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(None)

    def end(self) -> None:
        """End the ranks, and wait until they are gone."""
        with suppress(OSError):
            self._give_up.send(None)
        with suppress(TimeoutError, RegressError):
            self._job.result(_END)
        for connection in self._connections.values():
            connection.close()
        for end in (self._listener, self._given_up, self._give_up):
            end.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _broadcast(self, call: HostCall) -> None:
        """Send a call to all ranks; one that does not read keeps neither the others nor the service waiting."""
        data = bytes(ForkingPickler.dumps(call))
        for connection in self._connections.values():
            threading.Thread(target=_send, args=[connection, data], daemon=True).start()

    def _lost(self, rank: int, call: HostCall) -> HostLostError:
        """Return the error of a rank whose connection has ended."""
        why = self._failure(f"rank {rank} of {self._world_size} has closed its connection")
        return HostLostError(f"{call.method} failed: {why}", code="rank_failed", category="server")

    def _hung(self, silent: list[int], call: HostCall, seconds: float) -> HostLostError:
        """Return the error of ranks that do not answer: those that wait for no other, if there are any."""
        with suppress(OSError):
            self._give_up.send(None)
        with suppress(TimeoutError, RegressError):
            self._job.result(_END)
        logs = self._folder / "logs"
        alone = [rank for rank in silent if _COLLECTIVE not in _read(logs / f"rank{rank}.log")]
        culprits = alone or silent
        hang, they = ("hangs", "it") if len(culprits) == 1 else ("hang", "they")
        return HostLostError(
            f"""{call.method} failed: {named(culprits, self._world_size)} {hang}, {they} did not answer within
            {seconds:.3g} s""",
            code="rank_failed",
            category="server",
        )

    def _failure(self, otherwise: str) -> str:
        """Return why the ranks have ended, in the words of the pool."""
        try:
            self._job.result(_END)
        except (RankError, RegressError) as error:
            return str(error)
        except TimeoutError:
            pass
        return otherwise

    def _run(self, pool: RankPool, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
        try:
            pool.run(serve_rank, arguments, self._world_size, **settings)
        except BaseException as error:  # whoever waits gets it
            self._job.set_exception(error)
        else:
            self._job.set_result(None)


def _send(connection: Connection[Any, Any], data: bytes) -> None:
    with suppress(OSError):  # seen where the answer is awaited
        connection.send_bytes(data)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
