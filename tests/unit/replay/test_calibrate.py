"""Tolerances: the rule that makes them, what is measured, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regress.compare.quantities import QUANTITIES
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.engine.run_construction import Run
from regress.errors import ReplayError
from regress.golden.case_manifest import ToleranceEntry
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay import tolerance_calibration as module
from regress.replay.case_recording import Calibration, keep
from regress.replay.noise_floor import KAPPA, SEMANTICS, Floor, Response
from regress.replay.rollout_judge import SAMPLED
from regress.replay.tolerance_calibration import calibrate, perturbation, precisions_of, replays_of
from regress.replay.variant import Precision

GOLDEN = Path(__file__).parents[3] / "golden"
OF_THE_SAMPLER = {"sampler_log_probs", "mismatch"}
FP32, BF16 = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
SIZES = st.floats(0, 10)
LOW = st.sampled_from([Precision.FLOAT32, Precision.BFLOAT16])


def floor_of(
    precision: Precision, tensors: dict[str, Response], quantity: str = "gradient", seeds: int = 5
) -> Floor:
    return Floor.of(quantity, precision, tensors, seeds)


@settings(deadline=None)
@given(st.sampled_from([q.name for q in QUANTITIES if not q.exact]), LOW, SIZES, SIZES)
def test_a_tolerance_is_a_multiple_of_the_largest_of_three(
    quantity: str, precision: Precision, response: float, error: float
) -> None:
    floor = floor_of(precision, {"x": Response(response, error, 0.5)}, quantity)
    model = quantity in ("activations", "logit_gradient", "gradient", "param", "optimizer")
    spacing = (BF16 if model and precision is Precision.BFLOAT16 else FP32) / 8
    kappa = KAPPA[precision]
    assert kappa == {Precision.FLOAT32: 4, Precision.BFLOAT16: 3}[precision]
    entry = floor.entry
    assert entry.problem() is None
    basis = {"perturbation": response, "dtype_error": error, "seeds": 5, "kappa": kappa}
    if kappa * max(response, error) >= 1:  # it would pass zeros
        assert (entry.relative, entry.absolute) == (0.0, kappa * 0.5)
        assert entry.basis == basis | {"absolute": 0.5, "ill_conditioned": True}
    else:
        assert floor.floor == max(response, error, spacing)
        assert (entry.relative, entry.absolute) == (kappa * floor.floor, 0.0)
        assert entry.basis == basis


@pytest.mark.parametrize(
    ("response", "error", "reason"),
    [
        (2e-6, 1e-6, "4 times the noise floor of 2.0e-06 (weights moved by one ulp)"),
        (1e-6, 2e-6, "4 times the noise floor of 2.0e-06 (error against float64)"),
        (0.0, 1e-9, "4 times the noise floor of 1.5e-08 (an eighth of the dtype's spacing)"),
        (
            0.25,
            0.0,
            "ill-conditioned: rounding moves it by up to 2.5e-01 of its size, so its bound is absolute: 4 times what "
            "it was moved by (3.0e-09)",
        ),
    ],
)
def test_the_reason_tells_what_was_largest(response: float, error: float, reason: str) -> None:
    tensors = {"x": Response(response, error, 3e-9)}
    assert floor_of(Precision.FLOAT32, tensors).entry.reason == reason


LAYERS = {f"model.layers.{layer}.{name}": Response(2e-6, 1e-6, 1e-7) for layer in (0, 1) for name in "abc"}


def test_tensors_that_are_zero_but_for_rounding_have_a_bound_of_their_own() -> None:
    """They must not loosen that of the others, and cannot be judged in relation to themselves."""
    zeros = {
        f"model.layers.{layer}.k_proj.bias": Response(math.inf, 3e4, 2e-9 * (1 + layer)) for layer in (0, 1)
    }
    floor = floor_of(Precision.FLOAT32, {**LAYERS, **zeros})
    entry = floor.entry
    assert entry.relative == pytest.approx(4 * 2e-6)
    assert list(entry.tensors) == ["model.layers.*.k_proj.bias"]
    own = entry.tensors["model.layers.*.k_proj.bias"]
    assert (own.relative, own.absolute) == (0.0, 4 * 4e-9)
    assert own.basis["ill_conditioned"]
    assert own.basis["perturbation"] is None, "no size in relation to zeros, and JSON has no infinity"
    assert ToleranceEntry.from_json(entry.to_json()) == entry
    tolerance = floor.tolerance
    assert tolerance.of("model.layers.1.k_proj.bias").absolute == 4 * 4e-9
    assert tolerance.of("model.layers.1.a") == tolerance


def test_a_tensor_far_worse_than_the_others_is_set_apart_alone() -> None:
    """Only where the same tensor of every layer is does its pattern name them all."""
    tensors = {**LAYERS, "model.layers.1.a": Response(64 * 2e-6, 0.0, 5e-6)}
    assert list(floor_of(Precision.FLOAT32, tensors).ill) == ["model.layers.1.a"]
    tensors["model.layers.1.a"] = Response(31 * 2e-6, 0.0, 5e-6)
    floor = floor_of(Precision.FLOAT32, tensors)
    assert not floor.ill
    assert floor.floor == 31 * 2e-6


def test_tensors_that_rounding_leaves_alone_say_nothing_of_the_others() -> None:
    counters = {f"{name}/step": Response() for name in "abcdefgh"}
    floor = floor_of(Precision.FLOAT32, {**counters, "a/exp_avg": Response(3e-6, 0.0, 1.0)})
    assert not floor.ill
    assert floor.floor == 3e-6


def test_where_all_are_ill_conditioned_the_quantity_is_as_badly_off_as_the_worst() -> None:
    tensors = {"a": Response(0.5, 0.1, 2e-3), "b": Response(0.4, 0.1, 7e-3)}
    entry = floor_of(Precision.BFLOAT16, tensors).entry
    assert (entry.relative, entry.absolute) == (0.0, 3 * 7e-3)
    assert {pattern: own.absolute for pattern, own in entry.tensors.items()} == {"a": 3 * 2e-3, "b": 3 * 7e-3}


def test_in_float64_the_bound_is_fixed_and_what_moves_by_more_is_set_apart() -> None:
    tensors = {**LAYERS} | dict.fromkeys(LAYERS, Response(7e-15, 0.0, 1e-16))
    entry = floor_of(Precision.FLOAT64, tensors | {"zero": Response(0.5, 0.0, 3e-19)}).entry
    assert entry.relative == SEMANTICS == 1e-12
    assert "correct layouts differ by rounding only (floor 7.0e-15 here)" in entry.reason
    assert entry.tensors["zero"].absolute == 4 * 3e-19


def run_of(model: nn.Module, reference: nn.Module | None = None) -> Run:
    """As much of a run as a perturbation reads."""
    frozen = None if reference is None else SimpleNamespace(parameters=reference.named_parameters)
    policy = SimpleNamespace(model=model, named_parameters=model.named_parameters)
    stand_in: Any = SimpleNamespace(trainer=SimpleNamespace(policy=policy, reference=frozen))
    return stand_in


def test_a_perturbation_moves_the_reference_too() -> None:
    """Its log-probs have no other weights to answer to."""
    policy, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    before = reference.weight.detach().clone()
    perturbation(Precision.FLOAT32, 0)(run_of(policy, reference))
    assert (reference.weight != before).all()


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
    assert len(replays) == replays_of(case, 1) == 12
    recorded = {q for where in case.wheres() for q in case.quantities(where)}
    expected = {q.name for q in QUANTITIES if not q.exact} & recorded
    assert {(f.quantity, f.precision) for f in floors} == {(q, p) for q in expected for p in KAPPA}
    for floor in floors:
        stored = case.tolerance(floor.quantity, str(floor.precision))
        assert stored is not None
        if floor.entry.relative and stored.relative:  # one seed of the five that are stored
            assert floor.entry.relative <= 3 * stored.relative
    sizes = {(f.quantity, f.precision): f.floor for f in floors}
    for quantity in ("log_probs", "entropy"):
        measured = [sizes[quantity, p] for p in (Precision.FLOAT64, Precision.FLOAT32, Precision.BFLOAT16)]
        assert measured[0] < 1e-13 < 1e-9 < measured[1] < measured[2]


@pytest.mark.extended
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
        module._widen({}, [verdict], module._perturbed)
    assert str(error.value).startswith(
        f"gradient lm_head.weight at step1/rank0 cannot be measured ({status}: golden finite, actual NaN)"
    )


@pytest.fixture
def measured(case: GoldenCase) -> Calibration:
    """A measurement that nobody made."""
    tensors = {"a": Response(3e-5, 1e-5, 1.0), "b": Response(2.0, 0.0, 2e-4)}
    floors = [
        Floor.of("gradient", Precision.FLOAT32, tensors, 3),
        Floor.of("kl", Precision.BFLOAT16, {"kl": Response(2.0, 0.0, 0.25)}, 3),
    ]
    return Calibration(case, floors)


def test_a_measurement_touches_tolerances_only(store: GoldenStore, measured: Calibration) -> None:
    """Golden values and inputs are those that were recorded."""
    before = store.case("dense").manifest
    assert keep(measured)
    after = store.case("dense").manifest
    assert before is not None
    assert after is not None
    assert (after.truth, after.inputs) == (before.truth, before.inputs)
    gradient, kl = after.tolerances["gradient"], after.tolerances["kl"]
    assert gradient["float32"].relative == pytest.approx(1.2e-4)
    assert gradient["float32"].tensors["b"].absolute == pytest.approx(8e-4)
    assert (kl["bfloat16"].relative, kl["bfloat16"].absolute) == (0.0, 0.75)
    assert gradient["float64"] == before.tolerances["gradient"]["float64"]
    assert after.tolerances["ratio"] == before.tolerances["ratio"]
    assert not keep(measured), "it is in force"


@pytest.mark.parametrize("name", GoldenStore(GOLDEN).names())
def test_stored_tolerances_follow_from_what_was_measured(name: str) -> None:
    """None was written by hand."""
    case = GoldenStore(GOLDEN).case(name)
    assert case.manifest is not None
    recorded = {q for where in case.wheres() for q in case.quantities(where)}
    if case.sampled:
        recorded |= OF_THE_SAMPLER
    assert set(case.manifest.tolerances) == {q.name for q in QUANTITIES if not q.exact} & recorded
    for quantity, entries in case.manifest.tolerances.items():
        measured = {*precisions_of(case)}
        assert set(entries) == (measured & {*SAMPLED} if quantity == "sampler_log_probs" else measured)
        for precision, entry in entries.items():
            if entry.relative:
                shared = Response(entry.basis["perturbation"], entry.basis["dtype_error"])
                floor = Floor(quantity, Precision(precision), shared, entry.basis["seeds"])
                assert replace(entry, tensors={}) == floor.entry, (quantity, precision)
            for own in (*entry.tensors.values(), *([] if entry.relative else [entry])):
                assert own.basis["ill_conditioned"]
                assert own.absolute == own.basis["kappa"] * own.basis["absolute"], (quantity, precision)
            assert entry.basis["seeds"] >= 3
