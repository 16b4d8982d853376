"""Engines that do the units of a comparison: this process, processes of this machine, or a Ray cluster.

Under every engine, verdicts are the same to the last bit and in the same order (on processors of one kind: numpy
adds up in another order where vectors are longer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from regress.compare.dumps.engines.executor_warning import warn
from regress.errors import CompareError

if TYPE_CHECKING:
    from regress.compare.dumps.comparison import Engine

ENGINES = ("local", "processes", "ray")


def engine_named(
    name: str,
    *,
    workers: int | None = None,
    address: str | None = None,
    notify: Callable[[str], None] = warn,
) -> Engine:
    """Return the engine of that name.

    Args:
        workers: processes or tasks at a time; by default as many as there are processors.
        address: address of an existing Ray cluster; by default that of RAY_ADDRESS, else one is started here.
        notify: called with a sentence on each problem that was worked around; by default a warning.

    Raises:
        CompareError: for an unknown name, options that do not fit it, or if Ray is not installed.
    """
    if name not in ENGINES:
        raise CompareError(f"engine {name!r} does not exist: choose one of {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise CompareError(f"{workers} workers cannot compare anything: ask for at least one")
    if address is not None and name != "ray":
        raise CompareError(
            f"the address {address} is one of a Ray cluster: add --engine ray, or leave it out"
        )
    if name == "local" and workers not in (None, 1):
        raise CompareError(
            f"the engine local is this process alone, but {workers} workers were asked for: add --engine processes"
        )
    if name == "ray":
        from regress.compare.dumps.engines import ray_cluster

        ray_cluster.imported()
        return ray_cluster.Cluster(workers, address, notify)
    if name == "processes":
        from regress.compare.dumps.engines.process_pool import Processes

        return Processes(workers, notify)
    from regress.compare.dumps.comparison import serial

    return serial
