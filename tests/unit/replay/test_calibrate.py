"""Tolerances: the rule that makes them, what is measured, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regress.compare.quantities import QUANTITIES
from regress.compare.verdict import Place, Status, Verdict
from regress.engine.build import Run
from regress.errors import ReplayError
from regress.golden.case import GoldenCase
from regress.golden.store import GoldenStore
from regress.replay import calibrate as module
from regress.replay.calibrate import KAPPA, SEMANTICS, Floor, calibrate, perturbation, replays_of
from regress.replay.record import measure
from regress.replay.variants import Precision

GOLDEN = Path(__file__).parents[3] / "golden"
FP32, BF16 = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
SIZES = st.floats(0, 10)
LOW = st.sampled_from([Precision.FLOAT32, Precision.BFLOAT16])


@given(st.sampled_from([q.name for q in QUANTITIES if not q.exact]), LOW, SIZES, SIZES)
def test_a_tolerance_is_a_multiple_of_the_largest_of_three(
    quantity: str, precision: Precision, response: float, error: float
) -> None:
    floor = Floor(quantity, precision, response, error, 5)
    model = quantity in ("activations", "gradient", "param", "optimizer")
    spacing = (BF16 if model and precision is Precision.BFLOAT16 else FP32) / 8
    assert floor.floor == max(response, error, spacing)
    bound = {Precision.FLOAT32: 4, Precision.BFLOAT16: 3}[precision] * floor.floor
    assert floor.tolerance == (None if bound >= 1 else bound)
    assert floor.entry.relative == floor.tolerance
    assert floor.entry.basis == {
        "perturbation": response,
        "dtype_error": error,
        "seeds": 5,
        "kappa": KAPPA[precision],
    }
    assert floor.entry.problem() is None


@pytest.mark.parametrize(
    ("response", "error", "reason"),
    [
        (2e-6, 1e-6, "4 times the noise floor of 2.0e-06 (weights moved by one ulp)"),
        (1e-6, 2e-6, "4 times the noise floor of 2.0e-06 (error against float64)"),
        (0.0, 1e-9, "4 times the noise floor of 1.5e-08 (an eighth of the dtype's spacing)"),
        (0.25, 0.0, "4 times the noise floor of 2.5e-01 would pass a tensor of zeros: not judged"),
    ],
)
def test_the_reason_tells_what_was_largest(response: float, error: float, reason: str) -> None:
    assert Floor("gradient", Precision.FLOAT32, response, error, 5).entry.reason == reason


@pytest.mark.parametrize(("floor", "judged"), [(0.25, False), (math.nextafter(0.25, 0), True)])
def test_what_would_pass_zeros_is_not_judged(floor: float, judged: bool) -> None:
    assert (Floor("loss", Precision.FLOAT32, floor, 0.0, 5).entry.relative is not None) == judged


def test_in_float64_the_bound_is_fixed() -> None:
    entry = Floor("gradient", Precision.FLOAT64, 7e-15, 0.0, 5).entry
    assert entry.relative == SEMANTICS == 1e-12
    assert "correct layouts differ by rounding only (floor 7.0e-15 here)" in entry.reason


def run_of(model: nn.Module) -> Run:
    """As much of a run as a perturbation reads."""
    stand_in: Any = SimpleNamespace(trainer=SimpleNamespace(policy=model))
    return stand_in


@pytest.mark.parametrize("precision", KAPPA)
def test_a_perturbation_moves_every_weight_by_an_ulp(precision: Precision) -> None:
    dtype = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[precision.dtype]

    def moved(seed: int) -> torch.Tensor:
        model = nn.Linear(64, 64, bias=False, dtype=dtype)
        with torch.no_grad():
            model.weight.copy_(weights)
        perturbation(precision, seed)(run_of(model))
        return model.weight.detach()

    weights = torch.linspace(1, 2, 4096, dtype=torch.float64)[:-1].to(dtype)
    weights = torch.cat([weights, -weights[:1]]).reshape(64, 64)
    eps = torch.finfo(dtype).eps
    steps = (moved(0).double() - weights.double()) / (weights.double().abs() * eps)
    assert {-1, 1} == set(steps.sign().unique().tolist()), "every weight, up and down"
    assert steps.abs().max() <= 1.5 + eps  # rounded to the dtype: half an ulp more or less
    assert steps.abs().min() >= 0.25
    assert torch.equal(moved(0), moved(0))
    assert not torch.equal(moved(0), moved(1))


def test_a_calibration_measures_every_quantity_of_a_case(case: GoldenCase, tmp_path: Path) -> None:
    replays = []
    floors = calibrate(case, tmp_path, seeds=1, advance=lambda: replays.append(1))
    assert len(replays) == replays_of(1) == 12
    recorded = {q for where in case.wheres() for q in case.quantities(where)}
    expected = {q.name for q in QUANTITIES if not q.exact} & recorded
    assert {(f.quantity, f.precision) for f in floors} == {(q, p) for q in expected for p in KAPPA}
    for floor in floors:
        assert floor.floor < 1 or floor.tolerance is None
        stored = case.tolerance(floor.quantity, str(floor.precision))
        assert stored is not None
        if (
            floor.tolerance is not None and stored.relative is not None
        ):  # one seed of the five that are stored
            assert floor.tolerance <= 3 * stored.relative
    sizes = {(f.quantity, f.precision): f.floor for f in floors}
    for quantity in ("log_probs", "gradient", "param"):
        measured = [sizes[quantity, p] for p in (Precision.FLOAT64, Precision.FLOAT32, Precision.BFLOAT16)]
        assert measured[0] < 1e-13 < 1e-9 < measured[1] < measured[2]


def test_an_ill_conditioned_case_is_refused_by_its_quantity(
    case: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are moved by 1e-9 stand for a computation that magnifies an ulp to it."""

    def larger(precision: Precision, seed: int) -> Any:
        def move(run: Run) -> None:
            with torch.no_grad():
                for _, parameter in run.trainer.policy.named_parameters():
                    parameter *= 1 + 1e-9

        return move

    monkeypatch.setattr(module, "perturbation", larger)
    with pytest.raises(ReplayError) as error:
        calibrate(case, tmp_path, seeds=1)
    assert str(error.value).startswith("case dense: activations moves by ")
    assert "so 1e-12 cannot be asked of it; make the case better conditioned" in str(error.value)


@pytest.mark.parametrize("status", [s for s in Status if s not in (Status.OK, Status.DRIFT)])
def test_what_cannot_be_measured_is_named(status: Status) -> None:
    verdict = Verdict(status, "gradient", "lm_head.weight", Place(1, None, 0), "golden finite, actual NaN")
    with pytest.raises(ReplayError) as error:
        module._widen({}, [verdict])
    assert str(error.value).startswith(
        f"gradient lm_head.weight at step1/rank0 cannot be measured ({status}: golden finite, actual NaN)"
    )


def test_a_measurement_touches_tolerances_only(store: GoldenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged bound is measured anew; golden values and inputs are those that were recorded."""
    floors = [Floor("gradient", Precision.FLOAT32, 3e-5, 1e-5, 3), Floor("kl", Precision.BFLOAT16, 2.0, 0, 3)]
    monkeypatch.setattr("regress.replay.record.calibrate", lambda *_, **__: floors)
    before = store.case("dense").manifest
    assert measure(store, "dense", seeds=3) == floors
    after = store.case("dense").manifest
    assert before is not None
    assert after is not None
    assert (after.truth, after.inputs) == (before.truth, before.inputs)
    gradient, kl = after.tolerances["gradient"], after.tolerances["kl"]
    assert gradient["float32"].relative == pytest.approx(1.2e-4)
    assert kl["bfloat16"].relative is None
    assert gradient["float64"] == before.tolerances["gradient"]["float64"]
    assert after.tolerances["ratio"] == before.tolerances["ratio"]


@pytest.mark.parametrize("name", GoldenStore(GOLDEN).names())
def test_stored_tolerances_follow_from_what_was_measured(name: str) -> None:
    """None was written by hand."""
    case = GoldenStore(GOLDEN).case(name)
    assert case.manifest is not None
    recorded = {q for where in case.wheres() for q in case.quantities(where)}
    assert set(case.manifest.tolerances) == {q.name for q in QUANTITIES if not q.exact} & recorded
    for quantity, entries in case.manifest.tolerances.items():
        assert set(entries) == set(KAPPA)
        for precision, entry in entries.items():
            basis = {key: entry.basis[key] for key in ("perturbation", "dtype_error", "seeds")}
            floor = Floor(quantity, Precision(precision), **basis)
            assert entry == floor.entry, (quantity, precision)
            assert floor.seeds >= 3
