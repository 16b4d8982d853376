"""What a tolerance says of itself follows from what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.golden.store import GoldenStore
from regress.replay.calibrate import Floor
from regress.replay.variants import Precision

GOLDEN = GoldenStore(Path(__file__).parents[3] / "golden")


@pytest.mark.parametrize(
    ("perturbation", "dtype_error", "reason"),
    [
        (2e-6, 1e-6, "4 times the noise floor of 2.0e-06 (weights moved by one ulp)"),
        (1e-6, 2e-6, "4 times the noise floor of 2.0e-06 (error against float64)"),
        (0.0, 1e-9, "4 times the noise floor of 1.5e-08 (an eighth of the dtype's spacing)"),
        (0.5, 0.1, "4 times the noise floor of 5.0e-01 would pass a tensor of zeros: not judged"),
    ],
)
def test_the_reason_names_what_was_largest(perturbation: float, dtype_error: float, reason: str) -> None:
    floor = Floor("log_probs", Precision.FLOAT32, perturbation, dtype_error, seeds=5)
    assert floor.entry.reason == reason


@pytest.mark.parametrize("name", GOLDEN.names())
def test_recorded_tolerances_are_those_of_their_basis(name: str) -> None:
    """Nobody has loosened one by hand, and no reason is that of another measurement."""
    manifest = GOLDEN.case(name).manifest
    assert manifest is not None
    assert manifest.tolerances
    for quantity, row in manifest.tolerances.items():
        for precision, entry in row.items():
            measured = (entry.basis[key] for key in ("perturbation", "dtype_error", "seeds"))
            assert entry == Floor(quantity, Precision(precision), *measured).entry, (quantity, precision)
