"""Proof of tolerances: what is tried, and in which precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.compare.quantities import QUANTITIES as QUANTITIES_OF_ALL
from regress.replay import tolerance_proof as module
from regress.replay.noise_floor import KAPPA, Floor, Response
from regress.replay.replay_judge import stored_tolerances
from regress.replay.tolerance_proof import Trial, prove, run_count, tried_faults, try_out
from regress.replay.validation_run import HELD_OUT, ValidationRun
from regress.replay.variant import Precision
from tests.faults.fault import Fault
from tests.faults.registry import fault_named
from tests.golden_cases import opened

CASE = opened("dense")


QUANTITIES = ("gradient", "param", "loss")
FLOORS = [
    Floor.of(quantity, precision, {quantity: Response(1e-7, 1e-7, 1e-7)}, 3)
    for precision in KAPPA
    for quantity in QUANTITIES
]


def test_a_fault_is_tried_in_other_precisions_in_the_quantity_that_it_breaks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of the table could name another one; every healthy variant is judged by everything in all of them."""
    broken = {fault.name for fault in tried_faults()[::3]}
    elsewhere = {fault.name for fault in tried_faults()[1::3]}
    asked: list[tuple[str, Precision]] = []
    judged: dict[tuple[bool, Precision], set[str]] = {}

    def run(
        case: Any, variant: str, precision: Precision, folder: Path, bounds: Any, fault: Fault | None = None
    ) -> ValidationRun:
        name = variant if fault is None else fault.name
        asked.append((name, precision))
        own = judged.setdefault((fault is None, precision), set())
        own.update(quantity for quantity in QUANTITIES if bounds(quantity) is not None)
        first = "gradient" if name in broken else "coverage" if name in elsewhere else None
        return ValidationRun(variant if fault is None else fault.words, precision, first=first)

    monkeypatch.setattr(module, "run_validation", run)
    ticks: list[int] = []
    found = prove(CASE, FLOORS, tmp_path, lambda: ticks.append(1))
    assert len(ticks) == run_count(CASE) == 3 * (len(HELD_OUT) + len(tried_faults()))
    by = {precision: {name for name, told in asked if told is precision} for precision in Precision}
    everything = {*HELD_OUT, *(fault.name for fault in tried_faults())}
    assert by[Precision.FLOAT64] == everything
    assert by[Precision.FLOAT32] == by[Precision.BFLOAT16] == {*HELD_OUT, *broken}
    assert judged == {(True, precision): {*QUANTITIES} for precision in KAPPA} | {
        (False, Precision.FLOAT64): {*QUANTITIES},
        (False, Precision.FLOAT32): {"gradient"},
        (False, Precision.BFLOAT16): {"gradient"},
    }
    assert len(found.healthy) == 3 * len(HELD_OUT)
    assert len(found.faulty) == len(tried_faults()) + 2 * len(broken)
    assert {trial.name for trial in found.faulty if trial.precision is Precision.FLOAT32} == {
        fault.words for fault in tried_faults() if fault.name in broken
    }


def test_a_tolerance_that_is_too_loose_is_told_by_its_quantity_alone(tmp_path: Path) -> None:
    """Judged alone, a quantity says of a fault what it says beside all others; a wide tolerance hides the fault."""
    fault = fault_named("epsilon_inside_the_correction")
    stored = stored_tolerances(CASE, Precision.FLOAT32)("param")
    assert stored is not None

    def multiple(width: float, only: str | None) -> float:
        response = Response(width * stored.relative / KAPPA[Precision.FLOAT32], 0.0, 0.0)
        floors = [Floor.of("param", Precision.FLOAT32, {"param": response}, 3)]
        trial = Trial(CASE, Precision.FLOAT32, fault.variant, fault.name, floors, only)
        return try_out(trial, tmp_path / f"{width}{only}", lambda: None).multiples["param"]

    assert multiple(1.0, "param") == multiple(1.0, None) > 3
    assert multiple(1e4, "param") < 1


def test_what_a_case_leaves_out_fails_no_healthy_variant(tmp_path: Path) -> None:
    """It was not measured, and a replay records it all the same."""
    case = opened("rloo")
    assert case.leaves_out
    measured = stored_tolerances(case, Precision.FLOAT64)
    names = {quantity.name for quantity in QUANTITIES_OF_ALL} - {*case.leaves_out}
    floors = [
        Floor.of(name, Precision.FLOAT64, {name: Response(bound.relative, bound.relative, bound.relative)}, 3)
        for name in sorted(names)
        if (bound := measured(name)) is not None and bound.relative
    ]
    found = try_out(Trial(case, Precision.FLOAT64, "base", None, floors), tmp_path, lambda: None)
    assert found.problem is None
    assert found.first not in case.leaves_out
