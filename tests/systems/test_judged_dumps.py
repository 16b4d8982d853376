"""Small dumps that released trainers recorded, judged by the truth that the engine computes: nothing is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from regress.golden.golden_directory import GoldenStore
from regress.systems.cell_judge import Judgement, judge
from regress.systems.conformance_row import Result
from regress.systems.conformance_run import Workspace, explained
from regress.systems.exported import ExportedCase
from regress.systems.protocol import Cell, Declared, Layout

DUMPS = Path(__file__).parent / "dumps"
CLAIMED = {
    "algorithm.preset": "sft",
    "rollout_worker.temperature": 1.0,
    "optimizer.weight_decay": 0.0,
}
CELL = Cell(Layout("recorded", 2), "sft", warm=True)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("systems"), GoldenStore(Path(__file__).parents[2] / "golden"))


@pytest.fixture(scope="module")
def defective(workspace: Workspace) -> Judgement:
    """The judgement of the dump with the defect, nothing declared."""
    return judge(workspace.truth(CELL, CLAIMED), DUMPS / "trainer-tp2-accumulation")


def test_a_sharded_trainer_is_exact(workspace: Workspace) -> None:
    found = judge(workspace.truth(CELL, CLAIMED), DUMPS / "trainer-fsdp2-accumulation")
    assert found.result is Result.EXACT, found.told
    judged = {name for name, error in found.errors.items() if error.checks}
    assert {"log_probs", "loss", "token_gradient", "gradient", "optimizer", "param", "replicas"} <= judged
    assert found.errors["log_probs"].checks == 6  # three microbatches of two ranks


def test_a_defect_of_tensor_parallelism_is_located(defective: Judgement) -> None:
    found = defective
    assert found.result is Result.WRONG
    assert "gradient model.layers.1.self_attn.q_norm.weight" in found.told
    assert not found.errors["log_probs"].failed
    assert not found.errors["token_gradient"].failed


def test_what_was_declared_has_to_be_there(workspace: Workspace) -> None:
    declared = (Declared("loss", "it counts a sample twice", factor=2.0),)
    found = judge(workspace.truth(CELL, CLAIMED), DUMPS / "trainer-fsdp2-accumulation", declared)
    assert found.result is Result.UNDECLARED
    assert "loss was declared to differ (it counts a sample twice) and does not" in found.told


def test_a_declared_difference_of_another_size_is_wrong(workspace: Workspace, defective: Judgement) -> None:
    truth = workspace.truth(CELL, CLAIMED)
    dump = DUMPS / "trainer-tp2-accumulation"
    assert judge(truth, dump, (Declared("gradient", "as it is", amount=0.01),)).result is Result.WRONG
    worst = defective.errors["gradient"].relative
    assert worst is not None
    assert judge(truth, dump, (Declared("gradient", "as it is", amount=worst),)).result is Result.DECLARED
    assert judge(truth, dump, (Declared("grad_norm", "only that", amount=worst),)).result is Result.WRONG


def test_another_objective_is_another_truth(workspace: Workspace) -> None:
    claimed = CLAIMED | {"algorithm.aggregation": "seq-mean-token-mean"}
    found = judge(workspace.truth(CELL, claimed), DUMPS / "trainer-fsdp2-accumulation")
    assert found.result is Result.WRONG
    assert not found.errors["log_probs"].failed
    assert found.errors["token_gradient"].failed


def test_the_step_is_explained(workspace: Workspace) -> None:
    case = ExportedCase(workspace.export("dense"))
    found = explained(DUMPS / "trainer-fsdp2-accumulation", case, CLAIMED)
    assert found["preset"] == "the same gradients as sft, in this update"
    assert found["advantages"] == "1 for every sample"


def test_truths_are_computed_once(workspace: Workspace) -> None:
    assert workspace.truth(CELL, CLAIMED) is workspace.truth(replace(CELL, layout=Layout("other")), CLAIMED)
