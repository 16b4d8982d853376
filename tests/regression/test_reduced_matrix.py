"""Every fault of the corpus is caught by the matrix that runs by default, whichever replay it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.golden.golden_directory import GoldenStore
from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import Extent, Precision
from regress.replay.variant_table import VARIANTS
from tests.faults.fault import Fault, Shown
from tests.faults.registry import corpus
from tests.faults.trials.trial import Trial, judged, row_of

STORE = GoldenStore(Path(__file__).parents[2] / "golden")
CASES = [STORE.case(name) for name in STORE.names()]
REDUCED = {
    (found.case.name, found.variant.name): found
    for found in replays(CASES, VARIANTS, [*Precision], Extent.REDUCED)
    if found.precision in (Precision.FLOAT64, Precision.BITWISE)  # what float64 shows, changes bytes, too
}
ELSEWHERE = [
    fault
    for fault in corpus().values()
    if fault.wrong and not any((shown.case, shown.variant) in REDUCED for shown in fault.shown)
]
"""Faults that were written for replays that the reduced matrix does not have."""


def nearest(fault: Fault) -> list[Replay]:
    """Replays of the reduced matrix, those first that are most like the ones that the fault was written for."""
    cases, variants = ({getattr(shown, one) for shown in fault.shown} for one in ("case", "variant"))
    words = {word for name in variants for word in name.split("-")}

    def unlike(found: Replay) -> tuple[bool, int, bool, int]:
        name = found.variant.name
        return (
            name not in variants,
            -len(words & {*name.split("-")}),
            found.case.name not in cases,
            found.world_size,
        )

    return sorted(REDUCED.values(), key=unlike)


@pytest.mark.extended
@pytest.mark.parametrize("fault", ELSEWHERE, ids=lambda fault: fault.name)
def test_the_reduced_matrix_catches_a_fault_that_was_written_for_another_replay(fault: Fault) -> None:
    (first, *_) = fault.shown
    for found in nearest(fault)[:60]:
        shown = Shown(found.case.name, found.variant.name, first.first, says=first.says, steps=first.steps)
        trial = Trial(fault, shown, Precision.FLOAT64)
        if row_of(trial, judged(trial, STORE, diagnosed=False), 0.0).caught:
            return
    pytest.fail(f"no replay of the reduced matrix that is like those of {fault.name} catches it")
