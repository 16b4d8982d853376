"""Ranks as a launcher starts them, without the launcher: the first serves, the other follows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch.distributed as dist
from service_double import LORALESS, HistoryHost, request

from regress.service.core.host_executor import HostCall
from regress.service.core.torchrun_executor import LaunchedRanks, follow
from regress.service.service_api import ServiceError


@contextmanager
def joined() -> Iterator[HistoryHost]:
    """Open the double of this rank, with a process group."""
    dist.init_process_group("gloo")
    yield HistoryHost(dist.get_rank())


def launched(rank: int, port: int, does: str, told: Connection) -> None:
    """Run a rank; the first sends the error of a pass in which the other does not go on, and ends without goodbye."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank:
        follow(joined, rank)
        return
    ranks = LaunchedRanks(joined, 2)
    ranks.start()
    ranks.call(HostCall("create", ("m", LORALESS)), 60.0)
    try:
        ranks.call(HostCall("run_pass", ("m", request(1, rank=1, rank_does=does), {})), 2.0)
    except ServiceError as error:
        told.send((str(error), error.code))
    os._exit(0)
