"""A run that trains an adapter: its checkpoints hold the adapter alone, and it goes on from them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regress.engine.checkpoint import read_state
from tests.unit.checkpoint.conftest import Case

pytest.importorskip("peft")

ADAPTER = (
    *("model.lora.r=4", "algorithm.kl_coef=0.05", "reference.sync_every_n_steps=1"),
    *("warm_start.steps=2", "warm_start.batch_size=4"),
)


def test_an_adapter_goes_on(tmp_path: Path) -> None:
    whole, again = Case(tmp_path / "whole"), Case(tmp_path / "again")
    whole.run(*ADAPTER)
    names = {path.name for path in whole.checkpoint("checkpoint-1-update1").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    place = f"trainer.resume_from_checkpoint={whole.checkpoint('checkpoint-1-update1')}"
    again.run(*ADAPTER, place)
    for file in ("final/adapter_model.safetensors", "checkpoint-2/state/optimizer/step_000002.safetensors"):
        assert (again.folder / file).read_bytes() == (whole.folder / file).read_bytes(), file
    reference = [run.folder / "checkpoint-2/state/param/step_000002.safetensors" for run in (whole, again)]
    assert reference[0].read_bytes() == reference[1].read_bytes()
    assert read_state(again.checkpoint("checkpoint-2")).segment == 1
    settings = json.loads((whole.checkpoint("checkpoint-2") / "adapter_config.json").read_text())
    assert settings["r"] == 4
