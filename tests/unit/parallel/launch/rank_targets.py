"""Functions that ranks run in tests of the pool; a module of its own, because ranks import it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from regress.dump import Recorder, at, recording, tap


def rank() -> int:
    return distributed.get_rank()


def total(value: float = 1.0) -> float:
    """The sum over all ranks: none can have it without the others."""
    part = torch.tensor([value * (1 + rank())], dtype=torch.float64)
    distributed.all_reduce(part)
    return part.item()


def surroundings(names: list[str]) -> dict[str, Any]:
    """Return the environment of a rank."""
    return {
        "directory": str(Path.cwd()),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in names},
        "group": (distributed.get_rank(), distributed.get_world_size()),
        "process": os.getpid(),
        "main": hasattr(sys.modules["__main__"], "pytest"),
    }


def rendezvous_by_environment() -> float:
    """As a framework does it that knows nothing but torchrun's variables."""
    distributed.destroy_process_group()
    distributed.init_process_group("gloo")
    return total()


def late(seconds: float) -> int:
    """Rank 0 is done long before the others, which still open new connections through its store."""
    if rank() > 0:
        time.sleep(seconds)
    ranks = list(range(1, distributed.get_world_size()))
    group = distributed.new_group(ranks, use_local_synchronization=True) if rank() > 0 else None
    part = torch.ones(1)
    if group is not None:
        distributed.all_reduce(part, group=group)
    return int(part.item())


def raises(culprit: int, folder: str | None = None) -> float:
    """One rank raises, after it recorded something if there is a folder to record in."""
    if folder is not None:
        with recording(Recorder(folder, options={"loss": True})), at(step=3, rank=rank(), micro=1):
            tap("loss", loss=1.0)
            return raises(culprit)
    total()  # all ranks are connected: one that is not yet would fail before it says anything
    print(f"rank {rank()} says hello")
    if rank() == culprit:
        raise ValueError("wrong sign")
    return total()


def raises_with_a_child(file: str) -> None:
    """Leave a process behind."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(file).write_text(str(child.pid))
    raise ValueError("wrong sign")


def killed(culprit: int, number: int = signal.SIGKILL) -> float:
    if rank() == culprit:
        os.kill(os.getpid(), number)
    return total()


def leaves(culprit: int) -> float:
    if rank() == culprit:
        os._exit(3)
    return total()


def sleeps(culprit: int, file: str | None = None) -> float:
    """One rank never comes to the collective."""
    if file is not None:
        Path(f"{file}{rank()}").write_text(str(os.getpid()))
    if rank() == culprit:
        time.sleep(1000)
    return total()


def stops(culprit: int) -> float:
    """One rank is stopped, another one computes on and on."""
    if rank() == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    while rank() == culprit - 1:
        pass
    return total()


def stops_the_forkserver(file: str, waits: bool) -> float:
    """Rank 0 stops the process that forked it; all ranks wait for ever, or go on to their end."""
    Path(f"{file}{rank()}").write_text(str(os.getpid()))
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    if waits:
        time.sleep(1000)
    return total()


def goes_on(how: str, seconds: float) -> float:
    """One rank waits for a thread or a process of its own, the others wait for it."""
    busy = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    if rank() == 1 and how == "thread":
        thread = threading.Thread(target=exec, args=(busy, {}))
        thread.start()
        thread.join()
    elif rank() == 1:
        subprocess.run([sys.executable, "-c", busy], check=True)
    return total()


def needs_memory(culprit: int) -> float:
    """One rank has little memory, and needs much."""
    if rank() == culprit:
        with Path("/proc/self/statm").open() as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.zeros(2**28, dtype=torch.float64)
    return total()


def writes(culprit: int, folder: str, limit: int) -> float:
    """One rank's files may not become larger than ``limit`` bytes."""
    if rank() == culprit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with recording(Recorder(f"{folder}/{rank()}", options={"loss": True})):
        for step in range(3):
            with at(step=step, rank=rank(), micro=0):
                tap("loss", loss=torch.zeros(4096))
            total()
    return total()


def returns_what_cannot_be_sent() -> object:
    return lambda: None
