"""Hosts on the engine, and the executor that a configuration asks for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from regress.engine.config.config_schema import Config
from regress.errors import ConfigError
from regress.service.core.host_executor import Executor, InProcess
from regress.service.core.rank_executor import MODULES, RankExecutor
from regress.service.core.torchrun_executor import LaunchedRanks
from regress.service.service_api import Host

EXTENTS = ("pp", "dp", "fsdp", "ep", "cp", "tp")
_ENGINE = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "regress.parallel.parallel_policy",
    "regress.service.host.engine_host",
)


@contextmanager
def opened_host(
    configs: Mapping[str, Config], folder: Path, environ: Mapping[str, str] = os.environ
) -> Iterator[Host]:
    """Open the engine's host on this rank of those that the configurations ask for.

    Args:
        configs: what is offered, by name.
        folder: directory of the service.
        environ: its ``WEAVER_DEBUG_DUMP_*`` turn dumps on.
    """
    from regress.parallel.distributed_ranks import opened_world
    from regress.service.host.engine_host import EngineHost

    with opened_world(next(iter(configs.values()))) as world:
        yield EngineHost(configs, world, folder, environ=environ)


def world_size(config: Config) -> int:
    """Return the number of ranks that a configuration asks for."""
    return math.prod(getattr(config.parallel, name) for name in EXTENTS)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that a launcher has given this process, None if there is no launcher of several ranks."""
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return int(environ.get("RANK", "0"))


def executor_of(
    configs: Mapping[str, Config], folder: Path, *, environ: Mapping[str, str] | None = None
) -> Executor:
    """Return the executor of a service: on this process, on ranks of its own, or on those of a launcher.

    Args:
        environ: variables that turn dumps on; None: those of this process.

    Raises:
        ConfigError: if a launcher has started another number of ranks than the configuration asks for.
    """
    first = next(iter(configs.values()))
    count = world_size(first)
    open_host = partial(opened_host, configs, folder, dict(os.environ if environ is None else environ))
    if launched_rank() is not None:
        started = int(os.environ["WORLD_SIZE"])
        if started != count:
            raise ConfigError(f"""parallel asks for {count} ranks, and the launcher has started {started}; set extents
            in parallel whose product is that number, or start as many""")
        return LaunchedRanks(open_host, count)
    if count == 1:
        return InProcess(open_host)
    backend = "gloo" if first.device.partition(":")[0] == "cpu" else "cpu:gloo,cuda:nccl"
    return RankExecutor(
        open_host, count, modules=(*MODULES, *_ENGINE), patience=first.parallel.timeout, backend=backend
    )
