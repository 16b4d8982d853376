"""A store that several processes share: objects in a folder of this machine, which only its own protocol reaches."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from regress.dump import Recorder, at, recording, tap


class Shelf(LocalFileSystem):
    """`shelf:///folder/run`"""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("shelf://")))


def register() -> None:
    """Make the protocol known in this process."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)


def record(url: str, steps: int, fails: int | None = None) -> None:
    """Record a rank's part, or raise in the last step on the rank `fails`."""
    from torch import distributed

    register()
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    def gather(value: Any) -> list[Any]:
        found = [None] * ranks
        distributed.all_gather_object(found, value)
        return found

    with recording(Recorder(url, options={"loss": True}, rank=rank, gather=gather)):
        for step in range(steps):
            if rank == fails and step == steps - 1:
                raise RuntimeError("no more")
            with at(step=step, rank=rank):
                tap("loss", loss=float(10 * rank + step))
