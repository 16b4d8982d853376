"""Files of a checkpoint: what Hugging Face's users find there, and the rest."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from regress.engine.checkpoint import checkpoints, latest, read_state
from tests.unit.checkpoint.conftest import Case


def test_each_update_has_its_checkpoint(case: Case) -> None:
    names = [path.name for path in checkpoints(case.folder)]
    assert names == ["checkpoint-0-update1", "checkpoint-1", "checkpoint-1-update1", "checkpoint-2"]
    assert latest(case.folder) == case.checkpoint("checkpoint-2")


def test_transformers_loads_the_last_one_as_the_final_model(case: Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(case.checkpoint("checkpoint-2"))
    final = load_file(case.folder / "final" / "model.safetensors")
    for name, value in final.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_progress_has_the_names_of_the_trainer_of_transformers(case: Case) -> None:
    found = json.loads((case.checkpoint("checkpoint-1-update1") / "trainer_state.json").read_text())
    assert (found["global_step"], found["step"], found["max_steps"]) == (3, 1, 4)
    assert found["epoch"] == 2 / 12
    state = read_state(case.checkpoint("checkpoint-1-update1"))
    assert (state.step, state.update, state.updates_in_step, len(state.outcomes)) == (1, 3, 1, 1)
    assert state.config["data.group_size"] == 4


def test_the_unfinished_rollout_is_there_and_a_finished_one_is_not(case: Case) -> None:
    names = {
        name: {path.name for path in case.checkpoint(name).glob("*.safetensors")}
        for name in ("checkpoint-1-update1", "checkpoint-1")
    }
    between = {"model.safetensors", "optimizer.safetensors"}
    assert names == {
        "checkpoint-1-update1": {*between, "unfinished.safetensors"},
        "checkpoint-1": between,
    }
    found = load_file(case.checkpoint("checkpoint-1-update1") / "unfinished.safetensors")
    assert {name.partition("/")[0] for name in found} >= {"trajectory", "is_loss_debug"}


def test_its_optimizer_can_start_another_run(case: Case) -> None:
    path = case.checkpoint() / "optimizer.safetensors"
    case.run(f"output_dir={case.folder.parent / 'other'}", f"optimizer.state_path={path}", "max_steps=1")
