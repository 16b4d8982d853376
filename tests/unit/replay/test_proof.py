"""Proof of tolerances: what is tried, and in which precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.faults.fault import Fault
from regress.golden.store import GoldenStore
from regress.replay import proof as module
from regress.replay.proof import prove, run_count, tried_faults
from regress.replay.validation_run import HELD_OUT, ValidationRun
from regress.replay.variants import Precision

CASE = GoldenStore(Path(__file__).parents[3] / "golden").case("dense")


def test_a_fault_that_breaks_nothing_exactly_is_tried_in_no_other_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of the table could name it, as it begins in no quantity; every healthy variant runs in all."""
    broken = {fault.name for fault in tried_faults()[::3]}
    asked: list[tuple[str, Precision]] = []

    def run(
        case: Any, variant: str, precision: Precision, folder: Path, bounds: Any, fault: Fault | None = None
    ) -> ValidationRun:
        name = variant if fault is None else fault.name
        asked.append((name, precision))
        first = "gradient" if name in broken else None
        return ValidationRun(variant if fault is None else fault.words, precision, first=first)

    monkeypatch.setattr(module, "run_validation", run)
    ticks: list[int] = []
    found = prove(CASE, [], tmp_path, lambda: ticks.append(1))
    assert len(ticks) == run_count(CASE) == 3 * (len(HELD_OUT) + len(tried_faults()))
    by = {precision: {name for name, told in asked if told is precision} for precision in Precision}
    everything = {*HELD_OUT, *(fault.name for fault in tried_faults())}
    assert by[Precision.FLOAT64] == everything
    assert by[Precision.FLOAT32] == by[Precision.BFLOAT16] == {*HELD_OUT, *broken}
    assert len(found.healthy) == 3 * len(HELD_OUT)
    assert len(found.faulty) == len(tried_faults()) + 2 * len(broken)
    assert {trial.name for trial in found.faulty if trial.precision is Precision.FLOAT32} == {
        fault.words for fault in tried_faults() if fault.name in broken
    }
