"""A rank from its fork to its end: environment, output, process group, target, report."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

from regress.dump.coordinates import Coordinates
from regress.dump.taps import watching
from regress.parallel.launch.pool_messages import Done, Failed, Start, Tapped

LOOPBACK = "lo"


def run_rank(job: Start, rank: int, report: Connection, log: int, listener: socket.socket) -> NoReturn:
    """Run the target of a job as one of its ranks. The process ends here, or waits to be ended once it is done."""
    try:
        port = listener.getsockname()[1]
        _prepare_process(job, rank, log, port)
        value = _run(job, rank, report, port, listener)
        _flush()
        report.send(Done(value))
    except BaseException as error:  # an exit, too, is not an end of a job
        report.send(Failed.of(error))
        _flush()
        os._exit(1)
    while True:  # others may still need this rank's end of a connection: the pool ends all ranks together
        signal.pause()


def _prepare_process(job: Start, rank: int, log: int, port: int) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(rank_environment(rank, job.world_size, port))
    os.chdir(job.directory)
    sys.path[:] = job.path
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, handle in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, handle)
    for name in ("stdout", "stderr"):  # nobody's in the forkserver, which may have been started without any
        setattr(sys, name, os.fdopen(1 if name == "stdout" else 2, "w", buffering=1, closefd=False))
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank on one machine; the store exists already."""
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return found


def _run(job: Start, rank: int, report: Connection, port: int, listener: socket.socket) -> object:
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

    torch.set_num_threads(1)
    patience = timedelta(seconds=job.patience)
    store = TCPStore(
        "127.0.0.1",
        port,
        job.world_size,
        is_master=rank == 0,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    listener.close()
    distributed.init_process_group(
        job.backend, store=store, rank=rank, world_size=job.world_size, timeout=patience
    )
    last: Tapped | None = None

    def tell(record_type: str, where: Coordinates) -> None:
        nonlocal last
        if last != Tapped(record_type, str(where)):
            last = Tapped(record_type, str(where))
            report.send(last)

    with watching(tell):
        target, arguments = pickle.loads(job.payload)  # written by the pool
        return target(**arguments)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk must not hide what happened
            continue
