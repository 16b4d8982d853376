"""Checkpoints that Hugging Face's Trainer and peft wrote themselves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Doctor = Callable[..., Result]


def trained(folder: Path, *, adapter: bool) -> Path:
    """Two steps of Hugging Face's Trainer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    arguments = TrainingArguments(
        str(folder), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if adapter:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        Trainer(model, arguments, train_dataset=rows).train()
    return folder


def found(result: Result) -> dict[str, str]:
    return {issue["type"]: issue["severity"] for issue in json.loads(result.stdout)["issues"]}


@pytest.mark.extended
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_another_trainers_checkpoint_is_examined_as_far_as_it_goes(
    tmp_path: Path, doctor: Doctor, adapter: bool
) -> None:
    if adapter:
        pytest.importorskip("peft")
    folder = trained(tmp_path / "hf", adapter=adapter)
    healthy = doctor(folder, "--json")
    assert json.loads(healthy.stdout)["checkpoint_path"].endswith("checkpoint-2")
    assert (found(healthy), healthy.exit_code) == ({"foreign_checkpoint": "low"}, 0)

    weights = folder / "checkpoint-2" / ("adapter_model.safetensors" if adapter else "model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    torn = doctor(folder, "--json")
    assert (found(torn)["corrupted_model_weights"], torn.exit_code) == ("high", 1)
    weights.write_bytes(whole)
    (folder / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 0}')
    assert found(doctor(folder, "--json")) == {
        "foreign_checkpoint": "low",
        "incomplete_trainer_state": "medium",
        "invalid_global_step": "medium",
    }
    weights.unlink()
    assert found(doctor(folder, "--json"))["missing_model_weights"] == "high"
