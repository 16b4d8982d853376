"""A rank of a system under test: one cell, from the recorded batch to the dump and the proof of the layout."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from regress.errors import SystemsError
from regress.replay.exported import ExportedCase
from regress.systems.protocol import Cell
from regress.systems.registry import load

SHOWN = ("torch", "transformers", "accelerate")
"""Packages whose versions are kept beside the system's own."""
_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Job:
    """Work of a rank, which is pickled.

    Attributes:
        system: ``module:attribute`` of the adapter.
        export: folder of the exported case.
        folder: where the dump is recorded.
        plant: ``module:function`` of a context manager that changes the system around one cell; empty for none.
        paths: folders from which adapter and plant are imported besides.
    """

    system: str
    cell: Mapping[str, Any]
    export: str
    folder: str
    plant: str = ""
    paths: tuple[str, ...] = ()


def run_rank(job: Job) -> dict[str, Any]:
    """Carry a cell on this rank; return the facts that prove its layout, and versions.

    Raises:
        Exception: whatever the system raises.
    """
    _one_process_is_no_group()
    _quiet()
    cell = Cell.from_json(job.cell)
    system = load(job.system)
    with _planted(job.plant), closing(system):
        system.prepare(ExportedCase(Path(job.export)), cell, Path(job.folder))
        system.step()
        proof = system.engaged()
    return {
        "facts": dict(proof.facts),
        "missing": proof.missing,
        "versions": {name: found for name in (system.version_of, *SHOWN) if (found := _version(name))},
        "python": platform.python_version(),
    }


def _one_process_is_no_group() -> None:
    """Leave the process group of a single rank, so that the system sees what a plain process sees."""
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for name in _TORCHRUN:
            os.environ.pop(name, None)


def _quiet() -> None:
    """Silence bars; warnings go to the log of the rank."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


@contextmanager
def _planted(plant: str) -> Iterator[None]:
    """Run inside of the context manager that a plant names."""
    if not plant:
        yield
        return
    module, _, attribute = plant.partition(":")
    function = getattr(importlib.import_module(module), attribute, None)
    if function is None:
        raise SystemsError(f"there is nothing to plant at {plant}: write package.module:function")
    with function():
        yield


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
