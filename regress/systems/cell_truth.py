"""The truth of a cell: what the system's configuration claims, computed by the engine in true float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

WHOLE: Mapping[str, Any] = {"trainer.epochs": 1, "trainer.mini_batch_size": None}
"""A released trainer makes one update of each recorded rollout batch, unless the adapter says otherwise."""


def truth(
    export: Path, objective: Mapping[str, Any], updates: int, folder: Path, *, warm: bool = False
) -> Path:
    """Compute updates of an exported case under another objective, unpadded, on one process, in true float64.

    Args:
        objective: overrides as `regress.oracle.truth` takes them.
        updates: number of optimizer updates, from the first.
        folder: new, for the dump.
        warm: begin with the optimizer's state of the case; a released trainer starts its own.

    Returns:
        The folder of the dump.

    Raises:
        RegressError: if the export is damaged or the objective impossible.
    """
    from regress.oracle.exported_truth import program_of
    from regress.oracle.float64_engine import run_program
    from regress.replay.exported_case import ExportedCase

    program = program_of(ExportedCase(export), {**WHOLE, **objective}, updates, folder)
    return run_program(program if warm else replace(program, state=None))
