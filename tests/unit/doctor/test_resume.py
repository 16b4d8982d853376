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
    *("task.train_size=8", "task.eval_size=2", "data.prompts_per_step=2", "data.group_size=2"),
    *("data.max_completion_length=4", "evaluation.every_n_steps=2", "trainer.save_steps=2"),
)
STEPS = 5


class Trained(Run):
    """A run of the engine, with the places that the prepared damages know."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.lora = folder, False
        shutil.copytree(source, folder)


def train(folder: Path, *overrides: str) -> Result:
    return CliRunner().invoke(main, ["train", *SMALL, f"output_dir={folder}", *overrides])


def resume(folder: Path) -> Result:
    return train(folder, f"max_steps={STEPS}", "trainer.resume_from_checkpoint=latest")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after four steps, and one that was not."""
    folder = tmp_path_factory.mktemp("trained")
    for name, steps in (("stopped", 4), ("whole", STEPS)):
        result = train(folder / name, f"max_steps={steps}")
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The command sets variables and torch's switches for its own process, which here is ours."""
    environ, threads = dict(os.environ), torch.get_num_threads()
    for name in list(os.environ):
        if name.startswith(("REGRESS_", "WANDB_", "ATEN_", "NCCL_", "EXPERIMENT_PATH")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def applies(case: Broken) -> bool:
    """Return True for a damage that a run without curriculum, trackers and adapter can have."""
    told = case.name
    return not (case.lora or case.after == LEFT or "curriculum" in told or "tracking" in told)


HARMLESS = {"torn_metrics", "half_written_checkpoint", "replaced_checkpoint", "trainer_state_lacks_keys"}
"""What the next process passes over or mends itself."""
NOT_LATEST = {"no_manifest"}
"""A resume from the latest checkpoint takes another one."""


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in BROKEN if applies(case)])
def test_a_repaired_run_goes_on(world: Path, tmp_path: Path, case: Broken) -> None:
    run = Trained(tmp_path / "run", world / "stopped")
    case.damage(run)
    damaged = run.files()
    if case.name not in HARMLESS | NOT_LATEST:
        refused = resume(run.folder)
        if refused.exit_code:
            assert run.files() == damaged
            assert len(refused.stderr.splitlines()) == 1
        else:
            assert set(case.finds.values()) <= {"medium", "low"}, "a defect of high severity was passed over"
            run = Trained(tmp_path / "again", world / "stopped")
            case.damage(run)

    repaired = CliRunner().invoke(main, ["doctor", str(run.folder), "--auto-fix"])
    assert repaired.exit_code == 0, repaired.output
    start = 4 if run.checkpoint().exists() else 2  # weights may lie in final/, too
    assert start == 4 or case.after == ASIDE
    resumed = resume(run.folder)
    assert resumed.exit_code == 0, resumed.output
    assert f"checkpoint-{start}:{start}steps" in "".join(
        resumed.output.split()
    )  # lines are as wide as a terminal
    weights = [
        (folder / "final" / "model.safetensors").read_bytes() for folder in (run.folder, world / "whole")
    ]
    assert weights[0] == weights[1], "the repaired run went another way"
