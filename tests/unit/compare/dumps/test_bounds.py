"""Default tolerances: they follow the coarser dtype, say why, and let no change of 1e-4 in a log-prob pass."""

from __future__ import annotations

import pytest

from regress.compare.dumps.tolerance_bounds import Bounds, coarsest
from regress.compare.quantities import QUANTITIES
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.golden.case_manifest import ToleranceEntry
from tests.as_subtests import as_subtests


@as_subtests("dtype", ["float64", "float32", "float16", "bfloat16"])
@as_subtests("quantity", [q.name for q in QUANTITIES if not q.exact])
def test_every_quantity_has_a_bound_that_can_fail(quantity: str, dtype: str) -> None:
    bound = Bounds().of(quantity, [dtype, "float64"])
    assert 0 < bound.relative < 1
    assert dtype in bound.reason
    assert bound.basis["dtype"] == dtype


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_log_prob_off_by_a_ten_thousandth_is_beyond_it(dtype: str) -> None:
    assert Bounds().of("log_probs", [dtype]).relative * 40 < 1e-4  # no token is less likely than e**-40


def test_the_coarsest_dtype_decides() -> None:
    assert coarsest(["float32", "bfloat16", "float64"]) == "bfloat16"
    assert coarsest(["float16", "float32"]) == "float16"
    assert coarsest(["int64", "bool"]) == "float64"


def test_masks_are_exact_whatever_was_asked_for() -> None:
    assert Bounds(Tolerance(1.0)).of("batch_inputs", ["int64"]) is EXACT


def test_measured_tolerances_of_a_case() -> None:
    entry = ToleranceEntry(3e-6, 0.0, {"kappa": 4}, "measured")
    bounds = Bounds(measured={"log_probs": {"float32": entry}}, case="dense")
    found = bounds.of("log_probs", ["float32"])
    assert (found.relative, found.reason) == (3e-6, "measured (golden case dense)")
    assert bounds.of("entropy", ["float32"]).relative == Bounds().of("entropy", ["float32"]).relative
