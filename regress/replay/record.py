"""Recording a golden case: its inputs if they are missing, its golden values, and its measured tolerances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from regress.dump.jsontext import Json
from regress.errors import GoldenError, RegressError
from regress.golden.case import GoldenCase
from regress.golden.commit import commit
from regress.golden.names import input_files
from regress.golden.provenance import collect
from regress.golden.store import GoldenStore
from regress.golden.tolerance import ToleranceEntry
from regress.replay.calibrate import Floor, calibrate
from regress.replay.recipe import has_inputs, make_inputs, remove_inputs
from regress.replay.truth import compute_truth, require_case_signal


def record(store: GoldenStore, name: str, *, inputs: bool = False) -> list[Path]:
    """Record a case anew from its ``case.yaml``; tolerances are left to `measure`.

    Args:
        inputs: make weights, optimizer state and rollouts again although they exist.

    Returns:
        The files written, none when nothing changes.

    Raises:
        RegressError: if it cannot be recorded, or has too little signal; what was recorded is then unchanged.
    """
    case = store.case(name, allow_changed_inputs=True)
    makes = inputs or not has_inputs(case)
    try:
        with TemporaryDirectory(prefix="regress-record-") as workspace:
            if makes:
                if not case.recipe:
                    raise GoldenError(
                        f"{case.folder} has neither model/ nor a recipe in case.yaml; lay model/, trajectories/ and "
                        "optimizer.safetensors there, or say with a recipe how they are made"
                    )
                make_inputs(case, Path(workspace) / "inputs")
                case = store.case(name, allow_changed_inputs=True)
            truth = compute_truth(case, Path(workspace))
        require_case_signal(case, truth)
    except RegressError:
        if makes and case.recipe and case.manifest is None:  # else a corrected recipe would not be followed
            remove_inputs(case)
        raise
    changed = None if case.manifest is None else sorted({*case.manifest.inputs, *input_files(case.folder)})
    return commit(case.folder, truth=truth, inputs=changed, provenance=provenance_of(case), replace=True)


def measure(
    store: GoldenStore, name: str, *, seeds: int, advance: Callable[[], None] = lambda: None
) -> list[Floor]:
    """Measure the tolerances of a recorded case and write them into its manifest."""
    case = store.case(name)
    with TemporaryDirectory(prefix="regress-calibrate-") as workspace:
        floors = calibrate(case, Path(workspace), seeds=seeds, advance=advance)
    entries: dict[str, dict[str, ToleranceEntry]] = {}
    for floor in floors:
        entries.setdefault(floor.quantity, {})[str(floor.precision)] = floor.entry
    commit(case.folder, tolerances=entries, provenance=provenance_of(case))
    return floors


def provenance_of(case: GoldenCase) -> dict[str, Json]:
    """Configuration hash, versions, determinism environment and source revision of a recording made now."""
    threads: Any = case.config.get("threads", 1)
    return collect(
        case.config,
        threads=threads,
        processor=torch.backends.cpu.get_cpu_capability(),
        golden=case.folder.parent,
    )
