"""Recording of a golden case: its inputs if they are missing, its golden values, and its measured tolerances."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regress.compare.quantities import quantity_named
from regress.compare.verdicts.verdict import Status
from regress.dump.jsontext import Json
from regress.errors import GoldenError, RegressError
from regress.golden.case import GoldenCase
from regress.golden.commit import commit
from regress.golden.names import input_files
from regress.golden.pending import propose
from regress.golden.proposal import Pending
from regress.golden.provenance import collect, differences, told
from regress.golden.store import GoldenStore
from regress.golden.tolerance import ToleranceEntry
from regress.replay.calibrate import calibrate
from regress.replay.noise_floor import Floor
from regress.replay.proof import Proof, prove
from regress.replay.recipe import has_inputs, make_inputs, remove_inputs
from regress.replay.sampled import sample_rollouts
from regress.replay.truth import compute_truth, require_case_signal
from regress.replay.update import propose as propose_values
from regress.replay.workspace import Workspace


def record(store: GoldenStore, name: str, *, inputs: bool = False, signal: bool = True) -> list[Path]:
    """Record a case anew from its ``case.yaml``; tolerances are left to `measure`.

    Args:
        inputs: make weights, optimizer state and rollouts again although they exist.
        signal: refuse a case in which some faults could not show.

    Returns:
        The files written, none when nothing changes.

    Raises:
        RegressError: if it cannot be recorded, or has too little signal; what was recorded is then unchanged.
    """
    case = store.case(name, allow_changed_inputs=True)
    makes = inputs or not has_inputs(case)
    try:
        with Workspace() as workspace:
            if makes:
                if not case.recipe:
                    raise GoldenError(
                        f"{case.folder} has neither model/ nor a recipe in case.yaml; lay model/, trajectories/ and "
                        "optimizer.safetensors there, or say with a recipe how they are made"
                    )
                make_inputs(case, workspace / "inputs")
                case = store.case(name, allow_changed_inputs=True)
            if case.sampled:
                sample_rollouts(case, workspace / "rollouts")
                case = store.case(name, allow_changed_inputs=True)
            truth = compute_truth(case, workspace)
        if signal:
            require_case_signal(case, truth)
    except RegressError:
        if makes and case.recipe and case.manifest is None:  # else a corrected recipe has no effect
            remove_inputs(case)
        raise
    changed = None if case.manifest is None else sorted({*case.manifest.inputs, *input_files(case.folder)})
    return commit(case.folder, truth=truth, inputs=changed, provenance=provenance_of(case), replace=True)


def add(store: GoldenStore, name: str, quantities: Collection[str]) -> list[Path]:
    """Record quantities that a case lacks or has with other values, and keep the recorded values of all others.

    Returns:
        The files written, none when nothing changes.

    Raises:
        RegressError: for a name that is no quantity, one that the case does not compute, or a recorded value
            of another quantity that is computed differently now: the added values would belong to another
            computation.
    """
    for quantity in quantities:
        quantity_named(quantity)
    case = store.case(name)
    if case.manifest is None:
        raise GoldenError(
            f"{case.folder} has no golden values yet; record the case: regress golden record {name}"
        )
    with Workspace() as workspace:
        found = propose_values(case, workspace, everything=False)
    others = (change for change in found.changes if change.quantity not in quantities)
    other = next((change for change in others if change.status is not Status.EXTRA), None)
    if other is not None:
        raise GoldenError(
            f"case {name}: {other.quantity} {other.name} at {other.where} is not what was recorded "
            f"({other.status}), so "
            "nothing can be added beside it; find out why, or bring it up to date first: pytest --update-golden -k "
            f"{shlex.quote(f'{name} and {other.quantity}')}"
        )
    for quantity in quantities:
        if not any(quantity in row for row in found.truth.values()):
            raise GoldenError(f"case {name} computes no {quantity}, so it cannot have golden values of it")
    chosen = {
        where: {quantity: tensors for quantity, tensors in row.items() if quantity in quantities}
        for where, row in found.changed.items()
    }
    return commit(case.folder, truth=chosen, provenance=provenance_of(case))


@dataclass(frozen=True)
class Calibration:
    """Measurements of a case; ``proof`` is None where it was not asked for, ``only`` for all quantities."""

    case: GoldenCase
    floors: list[Floor]
    proof: Proof | None = None
    only: Collection[str] | None = None

    @property
    def entries(self) -> dict[str, dict[str, ToleranceEntry]]:
        """Tolerances in the form of the manifest."""
        found: dict[str, dict[str, ToleranceEntry]] = {}
        for floor in self.floors:
            if self.only is not None and floor.quantity not in self.only:
                continue
            found.setdefault(floor.quantity, {})[str(floor.precision)] = floor.entry
        return found


def measure(
    store: GoldenStore,
    name: str,
    *,
    seeds: int,
    proof: bool = False,
    only: Collection[str] | None = None,
    advance: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> Calibration:
    """Measure the tolerances of a recorded case; nothing is written.

    Args:
        proof: replay held-out variants and the corpus of faults, too.
        only: keep the tolerances of these quantities; None for all.
        advance: called after each replay.
        processes: number of processes that replay, which changes no value.
    """
    case = store.case(name)
    with Workspace() as workspace:
        measured = None if proof else only  # held-out variants are judged by all tolerances
        floors = calibrate(case, workspace, seeds=seeds, only=measured, advance=advance, processes=processes)
        missing = sorted({*(only or ())} - {floor.quantity for floor in floors})
        if missing:
            raise GoldenError(
                f"case {name} has no golden values of {missing[0]} to measure; add them: regress golden record {name} "
                f"--quantity {missing[0]}"
            )
        shown = prove(case, floors, workspace, advance, processes) if proof else None
        return Calibration(case, floors, shown, only)


def keep(store: GoldenStore, found: Calibration, *, accept: bool) -> list[Path] | Pending | None:
    """Write the tolerances into the manifest (the files written), or leave them for review (the pending update).

    Returns:
        Nothing, an empty list or None, where they are those that are recorded.
    """
    case, provenance = found.case, provenance_of(found.case)
    if accept:
        return commit(case.folder, tolerances=found.entries, provenance=provenance)
    return propose(store, case.name, tolerances=found.entries, provenance=provenance)


def surroundings(cases: Iterable[GoldenCase]) -> dict[str, str]:
    """Return the environment of replays of some cases, and its changes since each recording, as lines for a
    reader.
    """
    lines: dict[str, str] = {}
    for case in cases:
        now = provenance_of(case)
        lines = lines or told(now)
        if case.manifest is not None and (changed := differences(case.manifest.provenance, now)):
            lines[case.name] = ", ".join(changed)
    return lines


def provenance_of(case: GoldenCase) -> dict[str, Json]:
    """Return configuration hash, versions, determinism environment and source revision of a recording made now."""
    threads: Any = case.config.get("threads", 1)
    return collect(
        case.config,
        threads=threads,
        processor=torch.backends.cpu.get_cpu_capability(),
        golden=case.folder.parent,
    )
