"""Replays started by the launchers of a cluster: ``torchrun`` and ``accelerate launch``.

Each node runs one agent, which starts the node's ranks as ``python -m regress train --config-path FOLDER/config.yaml``.
All ranks record into one dump, which is judged on node 0.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from regress.errors import ConfigError, RankError, ReplayError
from regress.parallel.launch.job_standstill import REMEDY, STANDSTILL, STOPPED, Standstill

LAUNCHERS = ("torchrun", "accelerate")

_GRACE = 20.0
"""Seconds that an agent has to end its ranks."""

_ROOT_CAUSE = re.compile(r"^\s*rank\s*:\s*(\d+) .*?^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE | re.DOTALL)
_OF_LAUNCHER = re.compile(r"^[WE]\d{4} .*torch/distributed/", re.MULTILINE)
_TAIL = 3000


@dataclass(frozen=True)
class Launch:
    """Launch settings of a replay's ranks.

    Attributes:
        launcher: one of `LAUNCHERS`.
        nnodes: number of nodes that share the ranks.
        node_rank: index of this node; None: all of them are simulated on this machine.
        endpoint: ``host:port`` of node 0, needed where nodes are real.
        timeout: seconds until the launch is given up.
    """

    launcher: str
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ConfigError(f"there is no launcher {self.launcher!r}; choose one of {', '.join(LAUNCHERS)}")
        if self.nnodes < 1 or not 0 <= (self.node_rank or 0) < self.nnodes:
            raise ConfigError(
                f"there is no node {self.node_rank} of {self.nnodes}; --node-rank counts from 0 to --nnodes - 1"
            )
        if self.node_rank is not None and self.nnodes > 1 and self.endpoint is None:
            raise ConfigError(
                f"{self.nnodes} nodes need a place to meet; give --rdzv-endpoint HOST:PORT of node 0"
            )

    @property
    def judges(self) -> bool:
        """True if the dump is judged on this machine."""
        return not self.node_rank

    def run(
        self, config: Path, world_size: int, folder: Path, what: str, *, standstill: float = STANDSTILL
    ) -> None:
        """Start this node's agent, or those of all nodes, and wait for their end; ``folder`` keeps their output.

        Args:
            standstill: seconds after which it is given up if an agent or a rank is stopped.

        Raises:
            ConfigError: if the ranks cannot be shared out among the nodes.
            RankError: if a rank failed or is stopped.
            ReplayError: if an agent failed or is stopped, or there was no end.
        """
        if world_size % self.nnodes:
            raise ConfigError(
                f"{what} has {world_size} ranks, which {self.nnodes} nodes cannot share evenly; correct --nnodes"
            )
        folder.mkdir(parents=True, exist_ok=True)
        endpoint = self.endpoint or f"127.0.0.1:{_free_port()}"
        nodes = range(self.nnodes) if self.node_rank is None else [self.node_rank]
        agents = [
            _Agent(self._command(config, world_size, endpoint, node, folder), folder, node) for node in nodes
        ]
        try:
            _wait(agents, self.timeout, what, Standstill(standstill, idle=False))
        finally:
            for agent in agents:
                agent.end()

    def _command(self, config: Path, world_size: int, endpoint: str, node: int, folder: Path) -> list[str]:
        host, _, port = endpoint.rpartition(":")
        train = ["-m", "regress", "train", "--config-path", str(config)]
        if self.launcher == "accelerate":  # on CPUs, too, it takes --multi_gpu to start more than one process
            kind = ["--multi_gpu"] if world_size > 1 else []
            return [
                *(sys.executable, "-m", "accelerate.commands.launch", *kind, "--mixed_precision", "no"),
                *(
                    "--dynamo_backend",
                    "no",
                    "--num_processes",
                    str(world_size),
                    "--num_machines",
                    str(self.nnodes),
                ),
                *("--machine_rank", str(node), "--main_process_ip", host, "--main_process_port", port),
                *train,
            ]
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.nnodes)),
            *("--node-rank", str(node), "--nproc-per-node", str(world_size // self.nnodes)),
            *("--master-addr", host, "--master-port", port),
            *("--redirects", "3", "--log-dir", str(folder / f"node{node}")),
            *train,
        ]


class _Agent:
    """Running launcher, with its output in a file."""

    def __init__(self, command: list[str], folder: Path, node: int) -> None:
        self.node = node
        self._log: IO[bytes] = (folder / f"node{node}.log").open("w+b")
        self._logs = folder / f"node{node}"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    @property
    def printed(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def error(self, what: str) -> ReplayError:
        """Return the error of the rank that failed first, as far as the launcher names it."""
        printed = self.printed
        found = (
            _ROOT_CAUSE.search(printed[printed.rfind("Root Cause") :]) if "Root Cause" in printed else None
        )
        if found is None:
            failure = ReplayError(
                f"{what}: the launcher of node {self.node} ended with exit code {self.process.returncode}"
            )
            failure.add_note(printed[-_TAIL:])
            return failure
        rank, status = int(found[1]), int(found[2])
        how = (
            f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        )
        error = RankError(f"{what}: rank {rank} {how}", rank)
        for path in sorted(self._logs.glob(f"*/attempt_*/{rank}/stderr.log")):
            error.add_note(f"rank {rank} printed:\n{path.read_text(errors='replace')[-_TAIL:].strip()}")
        if not self._logs.is_dir():
            error.add_note(_OF_LAUNCHER.split(printed)[0].strip()[-_TAIL:])
        return error

    def stopped(self, process: int, what: str) -> ReplayError:
        """Return the error of the agent, or of a process below it, that a signal has stopped."""
        how = f"(process {process}) {STOPPED}: {REMEDY}"
        rank = None if process == self.process.pid else _rank(process)
        if rank is None:
            return ReplayError(f"{what}: the launcher of node {self.node} {how}")
        return RankError(f"{what}: rank {rank} {how}", rank)

    @property
    def processes(self) -> list[int]:
        """Processes of the agent and its ranks."""
        return [self.process.pid, *_descendants(self.process.pid)]

    def end(self) -> None:
        """End the agent and its ranks, gracefully or by force."""
        if self.process.poll() is None:
            processes = self.processes
            self.process.terminate()
            _signal(processes, signal.SIGCONT)  # stopped, none would notice
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            _signal(processes[1:], signal.SIGKILL)
        self._log.close()


def _wait(agents: list[_Agent], timeout: float, what: str, standstill: Standstill) -> None:
    end = time.monotonic() + timeout
    while running := [agent for agent in agents if agent.process.poll() is None]:
        with suppress(subprocess.TimeoutExpired):
            running[0].process.wait(max(0.0, min(end, standstill.due) - time.monotonic()))
            continue
        if time.monotonic() >= end:
            raise ReplayError(
                f"{what} did not come to an end within {timeout:g} s; see where it hangs, or raise --timeout"
            )
        found = {process: agent for agent in running for process in agent.processes}
        if stopped := standstill.look(found):
            raise found[stopped].stopped(stopped, what)
    failed = [agent for agent in agents if agent.process.returncode]
    if failed:
        raise min((agent.error(what) for agent in failed), key=lambda error: not isinstance(error, RankError))


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _rank(process: int) -> int | None:
    """Return the rank that a launcher has told a process."""
    with suppress(OSError):
        found = re.search(r"(?:^|\0)RANK=(\d+)", Path(f"/proc/{process}/environ").read_text(errors="replace"))
        return None if found is None else int(found[1])
    return None


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
