"""A rank of a system under test: one cell, from the recorded batch to the dump and the proof of the layout."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from regress.errors import SystemsError
from regress.replay.exported_case import ExportedCase
from regress.systems.protocol import Cell
from regress.systems.system_registry import load

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
        plant: ``module:function`` of a context manager that changes the system around one cell; empty for none. It
            begins before the system is prepared, or, if it takes the system as its argument, afterwards.
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
    system, plant = load(job.system), _plant(job.plant)
    late = plant is not None and bool(inspect.signature(plant).parameters)
    with ExitStack() as around:
        if plant is not None and not late:
            around.enter_context(plant())
        around.enter_context(closing(system))
        system.prepare(ExportedCase(Path(job.export)), cell, Path(job.folder))
        if plant is not None and late:
            around.enter_context(plant(system))
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


def _plant(name: str) -> Callable[..., AbstractContextManager[Any]] | None:
    """Return the context manager that a plant names; None for none.

    Raises:
        SystemsError: if there is none of that name.
    """
    if not name:
        return None
    module, _, attribute = name.partition(":")
    found: Callable[..., AbstractContextManager[Any]] | None = getattr(
        importlib.import_module(module), attribute, None
    )
    if found is None:
        raise SystemsError(f"there is nothing to plant at {name}: write package.module:function")
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
