"""Host on the ranks that a launcher such as torchrun has started: the first serves, the others follow it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

from regress.errors import lost_connection
from regress.parallel.launch.pool_messages import Failed
from regress.service.core.host_executor import HostCall, HostLostError, InProcess, OpenHost
from regress.service.core.rank_loop import Answer, Watch, agreed, answered, named
from regress.service.service_api import Host

_IDLE = timedelta(days=3650)
"""Time for which ranks wait for the next call."""
_LOST = "connection_lost"
"""Code of an error that does not say yet which rank it was."""


class LaunchedRanks(InProcess):
    """Calls the methods of hosts on the ranks of a launcher, in the process of the first.

    They cannot be started again from here: once one is lost, the process has to end, and the launcher starts all of
    them again.

    Args:
        open_host: opens the host of a rank, and with it the default process group.
        world_size: number of ranks.
    """

    def __init__(self, open_host: OpenHost, world_size: int) -> None:
        self._watches: list[Watch] = []
        super().__init__(partial(_leading, open_host, world_size, self._watches))
        self.world_size = world_size
        self.lost = False

    def call(self, call: HostCall, timeout: float) -> Any:
        """Return the result of a call on all ranks, that of the first."""
        try:
            return super().call(call, timeout)
        except HostLostError as error:
            self.lost = True
            if error.code not in ("timeout", _LOST):
                raise
            raise HostLostError(
                f"{call.method} failed: {self._trouble(error, timeout)}",
                code="rank_failed",
                category="server",
            ) from None

    def _trouble(self, error: HostLostError, timeout: float) -> str:
        """Return what keeps the ranks from answering, in the words of the ranks that can."""
        (watch,) = self._watches
        ranks = watch.silent() if error.code == _LOST else watch.hanging()
        if error.code == _LOST:
            who = named(ranks, self.world_size) if ranks else f"another of {self.world_size} ranks"
            return (
                f"{who} {'were' if len(ranks) > 1 else 'was'} lost ({error}); see what the launcher printed"
            )
        if not ranks:
            return (
                f"one of {self.world_size} ranks hangs, they did not come to an end within {timeout:g} s, and none "
                "tells which"
            )
        hang, they = ("hangs", "it") if len(ranks) == 1 else ("hang", "they")
        return f"{named(ranks, self.world_size)} {hang}, {they} did not answer within {timeout:g} s"

    def restart(self) -> None:
        """Raise `HostLostError`, as the launcher has to start all ranks again."""
        raise HostLostError(
            "the launcher has to start all ranks again", code="rank_failed", category="server"
        )

    def close(self) -> None:
        """End the calls of all ranks; without a rank that was lost there is nobody to wait for."""
        if not self.lost:
            super().close()


def follow(open_host: OpenHost, rank: int) -> None:
    """Make the calls that the first rank broadcasts, until it ends them: a signal to all ranks is for the first."""
    import torch.distributed as dist

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with open_host() as host:
        group = dist.new_group(backend="gloo", timeout=_IDLE)
        Watch(rank, dist.get_world_size())
        while (call := _received(group)) is not None:
            dist.gather_object(answered(host, call, rank), group=group)


class _Leader:
    """Host of the first rank, each of whose methods is one of the hosts of all ranks."""

    def __init__(self, host: Host, world_size: int) -> None:
        import torch.distributed as dist

        self._host, self._world_size = host, world_size
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    def end(self) -> None:
        self._send(None)

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        import torch.distributed as dist

        call = HostCall(method, arguments, settings)
        answers: list[Answer] = [None] * self._world_size  # type: ignore[list-item]  # filled by rank
        try:
            self._send(call)
            own = answered(self._host, call, 0)
            dist.gather_object(own, answers, group=self._group)
        except Exception as error:
            if not lost_connection(error):
                raise
            raise HostLostError(str(Failed.of(error).error), code=_LOST, category="server") from error
        return agreed(answers, call)

    def _send(self, call: HostCall | None) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list([call], src=0, group=self._group)


def _received(group: Any) -> HostCall | None:
    import torch.distributed as dist

    box: list[HostCall | None] = [None]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


@contextmanager
def _leading(open_host: OpenHost, world_size: int, watches: list[Watch]) -> Iterator[Host]:
    opened: AbstractContextManager[Host] = open_host()
    with opened as host:
        leader = _Leader(host, world_size)
        watches.append(Watch(0, world_size))
        yield cast(Host, leader)
        leader.end()
