"""Ranks of a run over torch.distributed, on one machine or many."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
)  # torch.distributed does not export them to type checkers
from transformers import PreTrainedModel

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import SingleProcess, World
from regress.errors import ConfigError, RegressError, lost_connection, reason
from regress.layout import Mesh
from regress.parallel.parallel_policy import ParallelPolicy
from regress.parallel.process_groups import ProcessGroups, rank_plan


class ProcessWorld(ProcessGroups):
    """One of several processes; see `regress.engine.engine_ranks.World`."""

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """Return the model split over the ranks."""
        return ParallelPolicy(model, self, **settings)


@contextmanager
def opened_world(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Yield the ranks of a run: this process alone, or those that a launcher has started.

    torchrun, accelerate launch and other launchers set a process's rank in environment variables (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The process group is closed at the end.

    Raises:
        ConfigError: if there are not as many processes as ``parallel`` asks for, they do not find one another, or this
            one has no device.
        RegressError: whatever ends one of them.
    """
    mesh = rank_plan(config.parallel).mesh
    started = _count(environ, "WORLD_SIZE", "1")
    if started != mesh.world_size:
        raise ConfigError(_wrong_number(mesh, started))
    if mesh.world_size == 1:
        yield SingleProcess()
        return
    device = _device(config.device, environ)
    owned = not dist.is_initialized()  # a process group is closed by the code that started it
    if owned:
        _open(config, device, started, environ)
    world = None
    try:
        with reporting_failures():
            world = ProcessWorld(config.parallel, device)
            yield world
    finally:
        if owned:
            _close(world)


def _close(world: ProcessWorld | None) -> None:
    """End all process groups and their threads: a thread that outlives the interpreter can abort the process."""
    dist.destroy_process_group()
    if world is not None:
        world.clear()
    gc.collect()  # sharded modules and their groups refer to one another


def _open(config: Config, device: torch.device, started: int, environ: Mapping[str, str]) -> None:
    """Open the process group of all processes, from the launcher's variables."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(f"""WORLD_SIZE={started} but {" and ".join(missing)} not set: {started} processes cannot find
        one another; start them with torchrun --nproc-per-node {started}, or set the variables that it sets""")
    rank = _count(environ, "RANK")
    if rank >= started:
        raise ConfigError(f"""RANK={rank} is not a number of one of WORLD_SIZE={started} processes; count them from 0,
        or start them with torchrun --nproc-per-node {started}""")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=config.parallel.timeout))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"""the {started} processes of this run do not find one another ({reason(error)}); start them
        with torchrun --nproc-per-node {started}, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE""") from error


def _device(name: str, environ: Mapping[str, str]) -> torch.device:
    """Return the device of this process, one of several on its machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name} cannot be used ({reason(error)}); set device=cpu or one that this machine has"
        ) from error
    if device.type == "cpu":
        return device
    if str(device) != "cuda":
        raise ConfigError(f"""device={name} cannot be that of several processes; set device=cuda, of which each process
        takes the one of its LOCAL_RANK, or device=cpu""")
    if "LOCAL_RANK" not in environ:
        raise ConfigError(f"""device={name}: LOCAL_RANK is not set, so that all processes of a machine would take the
        same GPU; start them with torchrun, or set it to the number of the process on its machine""")
    own, present = torch.device("cuda", _count(environ, "LOCAL_RANK")), torch.cuda.device_count()
    if own.index >= present:
        raise ConfigError(f"""device={name}: the process of LOCAL_RANK={own.index} finds no GPU of its own, of {present}
        here; start no more processes on a machine than it has GPUs, or set device=cpu""")
    torch.cuda.set_device(own)
    return own


def _count(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environ.get(name, default)
    if value is None or not value.isdecimal():
        raise ConfigError(f"""{name}={value} in the environment is not a number of a process or of processes; start them
        with torchrun or accelerate launch, or unset it""")
    return int(value)


def _wrong_number(mesh: Mesh, started: int) -> str:
    asked = (
        " * ".join(f"parallel.{name}={size}" for name, size in mesh.sizes.items() if size > 1) or "parallel"
    )
    verb = "was" if started == 1 else "were"
    remedy = (
        f"start them with torchrun --nproc-per-node {mesh.world_size} -m regress train ..."
        if mesh.world_size > 1
        else "set extents in parallel whose product is that number, such as parallel.dp"
    )
    plural = "process" if mesh.world_size == 1 else "processes"
    return f"{asked} asks for {mesh.world_size} {plural}, and {started} {verb} started; {remedy}"


_ERROR, _COUNT = "error", "errors"
_PATIENCE = timedelta(seconds=2)
"""Time in which a lost rank may still report its failure."""


@contextmanager
def reporting_failures() -> Iterator[None]:
    """Report the errors of a rank's work through the store of the default process group.

    Ranks that fail together agree on one error before they leave. This covers all other failures: the other
    ranks notice them when their connections close, and still learn the reason if the store outlives the
    failed rank, as that of a launcher does.

    Raises:
        RegressError: the error of the first rank that failed, or that a rank was lost without a report.
    """
    store = PrefixStore("regress", dist.distributed_c10d._get_default_store())
    try:
        yield
    except RegressError as error:
        first = _first_reported_error(store, error)
        if str(first) == str(error):
            raise
        raise first from error
    except Exception as error:
        if lost_connection(error):
            raise _heard(store) or _lost(error) from error
        _first_reported_error(
            store, RegressError(f"rank {dist.get_rank()} ended by an error of the program ({reason(error)})")
        )
        raise


def _first_reported_error(store: Store, error: RegressError) -> RegressError:
    """Return the first error that any rank reported."""
    try:
        if store.add(_COUNT, 1) > 1:
            return _heard(store) or error
        store.set(_ERROR, pickle.dumps(error).hex())
    except RuntimeError:  # the store is gone, and with it the other ranks
        return error
    return error


def _heard(store: Store) -> RegressError | None:
    try:
        store.wait([_ERROR], _PATIENCE)
        found = pickle.loads(bytes.fromhex(store.get(_ERROR).decode()))  # written by a rank
    except RuntimeError:
        return None
    return found if isinstance(found, RegressError) else None


def _lost(error: Exception) -> RegressError:
    return RegressError(f"""rank {dist.get_rank()} lost another rank, which ended without a word or did not answer for
    parallel.timeout seconds ({reason(error)}); look at what the others printed first, and at dmesg for lack of
    memory""")
