"""Every fault of the corpus is caught by the matrix that runs by default, whichever replay it was written for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import Extent, Precision
from regress.replay.variant_table import VARIANTS
from tests.faults.fault import Fault, Shown
from tests.faults.registry import corpus
from tests.faults.trials.trial import Trial, judged, row_of
from tests.golden_cases import STORE, cases


@cache
def reduced() -> dict[tuple[str, str], Replay]:
    """The reduced matrix by case and variant."""
    return {
        (found.case.name, found.variant.name): found
        for found in replays(cases(), VARIANTS, [*Precision], Extent.REDUCED)
        if found.precision in (Precision.FLOAT64, Precision.BITWISE)  # what float64 shows, changes bytes, too
    }


def elsewhere() -> list[Fault]:
    """Faults that were written for replays that the reduced matrix does not have."""
    return [
        fault
        for fault in corpus().values()
        if fault.wrong and not any((shown.case, shown.variant) in reduced() for shown in fault.shown)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Collect the faults only where their tests can run: to find them takes seconds."""
    config = metafunc.config
    named = any(Path(argument.partition("::")[0]).name == Path(__file__).name for argument in config.args)
    wanted = named or config.getoption("--extended") or config.getoption("-m")
    metafunc.parametrize("fault", elsewhere() if wanted else [], ids=lambda fault: fault.name)


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

    return sorted(reduced().values(), key=unlike)


@pytest.mark.extended
def test_the_reduced_matrix_catches_a_fault_that_was_written_for_another_replay(fault: Fault) -> None:
    (first, *_) = fault.shown
    for found in nearest(fault)[:60]:
        shown = Shown(found.case.name, found.variant.name, first.first, says=first.says, steps=first.steps)
        trial = Trial(fault, shown, Precision.FLOAT64)
        if row_of(trial, judged(trial, STORE, diagnosed=False), 0.0).caught:
            return
    pytest.fail(f"no replay of the reduced matrix that is like those of {fault.name} catches it")
