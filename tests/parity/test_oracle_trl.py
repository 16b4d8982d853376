"""`regress oracle` on TRL's unmodified GRPOTrainer: healthy runs pass, planted faults are caught, misses are listed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from trl_loop import make_world, train

from regress.compare.dumps.comparison import Comparison
from regress.oracle.oracle_judge import judge_dump

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about themselves

RUN: dict[str, Any] = {
    "temperature": 0.7,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 8,
}
"""Three updates, of which two train on one rollout: with ratios other than 1, a KL term, and two microbatches."""
FAULTS = {
    "denominator": "loss",
    "mask": "token_gradient",
    "deviation": "loss",
    "temperature": "loss",
    "epsilon": "log_probs",
    "norms": "gradient",
    "decay": "param",
}
"""Planted fault -> the quantity that breaks first."""
BELOW_BFLOAT16 = {
    "epsilon": "an epsilon of 1e-3 in place of 1e-6 moves log-probs by less than bfloat16 rounds them",
    "decay": "a decay of 1e-4 of each weight is less than the updates of rounded gradients differ by",
}
"""Fault that the measured tolerance of bfloat16 does not show, and why."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("trl"))


def judged(work: Path, world: Path, **changes: Any) -> Comparison:
    train(work / "dump", world, told=True, **{**RUN, **changes})
    settings = {"algorithm.kl_coef": 0.05}
    found = judge_dump(
        work / "dump", work / "truth", preset="trl:dapo", settings=settings, reference="initial"
    )
    assert not found.comparison.problems
    return found.comparison


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_healthy(tmp_path: Path, world: Path, bf16: bool) -> None:
    found = judged(tmp_path, world, bf16=bf16)

    assert found.exit_code == 0, found.failed[:3]
    quantities = {verdict.quantity for verdict in found.verdicts}
    assert {
        "log_probs",
        "loss",
        "token_gradient",
        "gradient",
        "grad_norm",
        "param",
        "optimizer",
    } <= quantities
    assert {verdict.place.step for verdict in found.verdicts} == {0, 1, 2}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_float32(tmp_path: Path, world: Path, fault: str) -> None:
    found = judged(tmp_path, world, fault=fault)

    assert found.exit_code == 1
    assert found.failed[0].quantity == FAULTS[fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_bfloat16(tmp_path: Path, world: Path, fault: str) -> None:
    found = judged(tmp_path, world, fault=fault, bf16=True)

    assert found.exit_code == (0 if fault in BELOW_BFLOAT16 else 1)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "cispo"])
def test_other_objectives(tmp_path: Path, world: Path, loss: str) -> None:
    changes: dict[str, Any] = {"loss_type": loss, "beta": 0.0}
    settings: dict[str, Any] = {}
    if loss == "dr_grpo":
        changes["scale_rewards"] = "none"
        settings["algorithm.norm_length"] = 12
    if loss == "cispo":
        changes["epsilon_high"] = 5.0
    train(tmp_path / "dump", world, told=True, **{**RUN, **changes})
    found = judge_dump(tmp_path / "dump", tmp_path / "truth", preset=f"trl:{loss}", settings=settings)

    assert found.comparison.exit_code == 0, found.comparison.failed[:3]
