"""Real runs, damaged in the same ways: a resume refuses them, and after the repair it goes on where it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from regress.cli import main
from tests.unit.doctor.broken import ASIDE, BROKEN, LEFT, Broken
from tests.unit.doctor.builder import Run

SIZES = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}"
SMALL = (
    f"model.config={SIZES}",
    *("task.train_size=64", "task.eval_size=24", "data.prompts_per_step=2", "data.group_size=2"),
    *("data.max_completion_length=4", "evaluation.every_n_steps=2", "trainer.save_steps=2"),
    "curriculum.enable=true",
)
LORA = ("model.lora.r=2",)
STEPS = 5


class Trained(Run):
    """A run of the engine, with the places that the prepared damages know."""

    def __init__(self, folder: Path, source: Path, *, lora: bool = False) -> None:
        self.folder, self.lora = folder, lora
        shutil.copytree(source, folder)


def train(folder: Path, *overrides: str) -> Result:
    return CliRunner().invoke(main, ["train", *SMALL, f"output_dir={folder}", *overrides])


def resume(run: Run) -> Result:
    kind = LORA if run.lora else ()
    return train(run.folder, *kind, f"max_steps={STEPS}", "trainer.resume_from_checkpoint=latest")


def trained(folder: Path, *overrides: str) -> Path:
    for name, steps in (("stopped", 4), ("whole", STEPS)):
        result = train(folder / name, f"max_steps={steps}", *overrides)
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after four steps, and one that was not."""
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def lora_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an adapter."""
    return trained(tmp_path_factory.mktemp("lora"), *LORA)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """The command sets variables and torch's switches for its own process, which here is ours."""
    environ, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


HARMLESS = {
    *("torn_metrics", "half_written_checkpoint", "replaced_checkpoint", "trainer_state_lacks_keys"),
    *("no_manifest", "torn_tracking_state", "torn_curriculum_state", "curriculum_stage_is_a_list"),
    *("curriculum_lacks_its_stage", "curriculum_stage_without_threshold"),
}
"""Damage that the next process passes over or mends itself."""
REPAIRABLE = [pytest.param(case, id=case.name) for case in BROKEN if case.after != LEFT]


@pytest.mark.one_in(60)
@pytest.mark.parametrize("case", [case for case in REPAIRABLE if not case.values[0].lora])
def test_a_repaired_run_goes_on(world: Path, tmp_path: Path, case: Broken) -> None:
    goes_on(world, tmp_path, case)


@pytest.mark.extended
@pytest.mark.parametrize("case", [case for case in REPAIRABLE if case.values[0].lora])
def test_a_repaired_run_of_an_adapter_goes_on(lora_world: Path, tmp_path: Path, case: Broken) -> None:
    pytest.importorskip("peft")
    goes_on(lora_world, tmp_path, case)


def goes_on(world: Path, folder: Path, case: Broken) -> None:
    run = Trained(folder / "run", world / "stopped", lora=case.lora)
    case.damage(run)
    damaged = run.files()
    if case.name not in HARMLESS:
        refused = resume(run)
        if refused.exit_code:
            assert run.files() == damaged
            assert refused.stderr.startswith("error: ")
            assert len(refused.stderr.splitlines()) == 1
        else:
            assert set(case.finds.values()) <= {"medium", "low"}, "a defect of high severity was passed over"
            run = Trained(folder / "again", world / "stopped", lora=case.lora)
            case.damage(run)

    repaired = CliRunner().invoke(main, ["doctor", str(run.folder), "--auto-fix"])
    assert repaired.exit_code == 0, repaired.output
    start = 4 if run.checkpoint().exists() else 2  # weights may lie in final/, too
    assert start == 4 or case.after == ASIDE
    resumed = resume(run)
    assert resumed.exit_code == 0, resumed.output
    told = "".join(resumed.output.split())  # lines are as wide as a terminal
    assert f"checkpoint-{start}:{start}steps" in told
    name = "adapter_model.safetensors" if case.lora else "model.safetensors"
    weights = [(place / "final" / name).read_bytes() for place in (run.folder, world / "whole")]
    assert weights[0] == weights[1], "the repaired run went another way"
