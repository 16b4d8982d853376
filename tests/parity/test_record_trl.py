"""`record` around TRL's unmodified GRPOTrainer: layouts of one batch agree, faults are named, nothing changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from trl_loop import make_trainer, make_world, train, train_on_ranks

from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.dump.dump_reader import DumpReader

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about themselves


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def golden(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "dump"
    train(folder, world)
    return folder


def compare(golden: Path, actual: Path) -> Comparison:
    return compare_dumps(str(golden), str(actual))


def first_failures(report: Comparison) -> dict[str, str]:
    found: dict[str, str] = {}
    for verdict in report.failed:
        where = "" if verdict.worst is None else verdict.worst.where
        found.setdefault(verdict.quantity, f"{verdict.detail} {where}")
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "padded-wider": {"pad_to_multiple_of": 8},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_one_batch_are_equal(tmp_path: Path, world: Path, golden: Path, name: str) -> None:
    train(tmp_path / "dump", world, **LAYOUTS[name])
    report = compare(golden, tmp_path / "dump")
    assert report.exit_code == 0, first_failures(report)
    checked = {verdict.quantity for verdict in report.verdicts}
    assert {"log_probs", "loss", "token_gradient", "gradient", "grad_norm", "param"} <= checked


def test_two_ranks_under_ddp_equal_one(tmp_path: Path, world: Path, golden: Path) -> None:
    train_on_ranks(2, tmp_path / "dump", world, per_device_train_batch_size=8)
    report = compare(golden, tmp_path / "dump")
    assert report.exit_code == 0, first_failures(report)
    assert DumpReader(tmp_path / "dump").manifest.provenance.mesh == {"world_size": 2, "dp": 2}


def test_lora(tmp_path: Path, world: Path) -> None:
    train(tmp_path / "a", world, peft=True)
    train(tmp_path / "b", world, peft=True, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, first_failures(report)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_sampling_temperature_is_found(tmp_path: Path, world: Path, temperature: float) -> None:
    train(tmp_path / "dump", world, temperature=temperature)
    reader = DumpReader(tmp_path / "dump")
    for name in reader.names():
        if name.startswith("token_gradient/"):
            record = reader.read(name)
            assert record.meta["temperatures"] == [temperature]
            assert record.tensors["token_residual"].max() < 5e-6


@pytest.mark.parametrize(
    ("fault", "first"), [("forward", "log_probs"), ("denominator", "loss"), ("mask", "token_gradient")]
)
def test_a_fault_is_named_where_it_arises(
    tmp_path: Path, world: Path, golden: Path, fault: str, first: str
) -> None:
    halves = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    train(tmp_path / "dump", world, fault=fault, **halves)
    found = first_failures(compare(golden, tmp_path / "dump"))
    assert next(iter(found)) == first
    assert "token_gradient" in found
    assert "position" in found["token_gradient"]
    assert "batch_inputs" not in found


def test_training_is_the_same_to_the_bit(tmp_path: Path, world: Path) -> None:
    recorded = train(tmp_path / "dump", world)
    state = torch.get_rng_state()
    trainer = make_trainer(world)
    trainer.train()
    assert torch.equal(state, torch.get_rng_state())
    own = recorded.model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in trainer.model.state_dict().items())
