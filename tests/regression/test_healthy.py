"""Tolerances are neither too narrow nor too wide: what is healthy passes, what is broken fails, also unmeasured."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.golden.golden_directory import GoldenStore
from regress.replay import tolerance_validation as module
from regress.replay.replay_judge import stored_tolerances
from regress.replay.tolerance_calibration import LAYOUTS
from regress.replay.tolerance_validation import Exposure, ValidatedSeed, Validation, validate
from regress.replay.validation_run import HELD_OUT, ValidationRun, run_validation
from regress.replay.variant import Precision
from tests.faults.fault import Fault
from tests.faults.registry import corpus

GOLDEN = Path(__file__).parents[2] / "golden"
FAMILIES = ("dense", "moe", "gpt2", "tied", "tools")
FAULTS = {fault.words: fault for fault in corpus().values()}


def tried(
    case: str, variant: str, precision: Precision, folder: Path, fault: Fault | None = None
) -> ValidationRun:
    """A run by the tolerances that are recorded."""
    opened = GoldenStore(GOLDEN).case(case)
    found = run_validation(
        opened, variant, precision, folder / "x", stored_tolerances(opened, precision), fault
    )
    assert found.problem is None
    assert found.multiples
    return found


def test_what_is_held_out_is_measured_with_nowhere() -> None:
    assert len(set(HELD_OUT)) == 10
    assert not set(HELD_OUT) & {variant.name for variant in LAYOUTS}


@pytest.mark.parametrize(
    ("case", "variant", "precision"),
    [
        ("moe", "packed-dynamic", Precision.FLOAT32),
        ("gpt2", "adamw-fused", Precision.FLOAT32),
        ("tools", "eager", Precision.BFLOAT16),
    ],
)
def test_healthy_replays_pass(case: str, variant: str, precision: Precision, tmp_path: Path) -> None:
    found = tried(case, variant, precision, tmp_path)
    assert found.first is None, found.worst
    assert 0 < found.multiple < 1


@pytest.mark.parametrize(
    ("case", "name", "first"),
    [
        ("dense", "epsilon inside the correction", "param"),  # the smallest of all
        ("dense", "norm epsilon", "activations"),
        pytest.param("gpt2", "gradients in bfloat16", "gradient", marks=pytest.mark.extended),
        pytest.param("moe", "coefficients off", "token_loss", marks=pytest.mark.extended),
    ],
)
def test_the_smallest_faults_fail_where_they_begin(case: str, name: str, first: str, tmp_path: Path) -> None:
    found = tried(case, FAULTS[name].variant, Precision.FLOAT32, tmp_path, FAULTS[name])
    assert found.first == first
    assert found.multiple > 3


def test_what_cannot_be_run_is_a_problem_and_no_pass(tmp_path: Path) -> None:
    opened = GoldenStore(GOLDEN).case("dense")
    fault = FAULTS["router not normalized"]
    bounds = stored_tolerances(opened, Precision.FLOAT64)
    found = run_validation(opened, "mbs4", Precision.FLOAT64, tmp_path / "x", bounds, fault)
    assert found.problem == "there is no router"
    assert not found.multiples


OK = ValidationRun("left", Precision.FLOAT32, {"loss": 1e-7}, {"loss": 0.5})
BAD = ValidationRun("left", Precision.FLOAT32, {"loss": 1e-5}, {"loss": 50.0}, "loss", "loss loss at step0")
STUCK = ValidationRun("left", Precision.FLOAT32, problem="no room")


@pytest.mark.parametrize(
    ("healthy", "exposures", "alarms", "misses"),
    [
        ([OK], [Exposure(BAD, True)], 0, 0),
        ([OK, BAD], [Exposure(BAD, True)], 1, 0),
        ([STUCK], [Exposure(STUCK, True)], 1, 0),
        ([OK], [Exposure(OK, True), Exposure(OK, False)], 0, 1),
    ],
)
def test_false_alarms_and_misses_are_counted(
    healthy: list[ValidationRun],
    exposures: list[Exposure],
    alarms: int,
    misses: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found = Validation("dense", [ValidatedSeed(7, healthy, exposures)])
    assert (len(found.alarms), len(found.misses)) == (alarms, misses)
    assert found.summary.endswith(f"{misses} missed")
    monkeypatch.setattr(module, "validate", lambda *_, **__: found)
    command = ["golden", "validate", "dense", "--golden-dir", str(GOLDEN), "--report", str(tmp_path)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == int(bool(alarms or misses)), result.output
    assert found.summary in result.output
    assert (tmp_path / "validation-dense.json").is_file()


def test_a_case_without_a_recipe_has_no_other_seeds(tmp_path: Path) -> None:
    folder = tmp_path / "golden" / "mine"
    folder.mkdir(parents=True)
    (folder / "case.yaml").write_text("reason: laid by hand\n")
    result = CliRunner().invoke(
        main, ["golden", "validate", "mine", "--golden-dir", str(tmp_path / "golden")]
    )
    assert result.exit_code == 2
    assert "mine has no recipe in case.yaml, so it has no other seeds; say how" in result.output


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_another_draw_of_a_case_has_no_false_alarm_and_no_miss(name: str) -> None:
    """Other weights and rollouts, recorded and calibrated anew: ten held-out variants, and 22 faults."""
    found = validate(GoldenStore(GOLDEN).case(name), 1)
    assert found.alarms == []
    assert found.misses == []
    assert sum(row.exercised for row in found.faulty) >= 18
