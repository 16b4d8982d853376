"""Pool of ranks that all replays of a process share."""

from __future__ import annotations

from regress.engine.config.batching_config import ParallelConfig
from regress.engine.config.config_schema import Config
from regress.parallel.launch.job_standstill import STANDSTILL
from regress.parallel.launch.rank_pool import RankPool

MODULES = ("regress.replay.forkserver_warmup",)
"""Modules that replays need, imported once in the forkserver."""

_shared: RankPool | None = None


def shared_pool() -> RankPool:
    """Return the pool of this process."""
    global _shared
    if _shared is None:
        _shared = RankPool(MODULES)
    return _shared


def close_shared_pool() -> None:
    """Close the shared pool, if there is one."""
    if _shared is not None:
        _shared.close()


def standstill_of(config: Config) -> float:
    """Return the seconds after which a replay that stands still is given up: ``parallel.timeout`` where it is set."""
    given = config.parallel.timeout
    return STANDSTILL if given == ParallelConfig().timeout else given
