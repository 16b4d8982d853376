"""A run that trains an adapter: its checkpoints hold the adapter alone, and it goes on from them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regress.engine.checkpoint import read_state
from tests.unit.checkpoint.conftest import Case
from tests.unit.checkpoint.schema_1 import downgrade

pytest.importorskip("peft")

ADAPTER = (
    *("model.lora.r=4", "algorithm.kl_coef=0.05", "reference.sync_every_n_steps=1"),
    *("warm_start.steps=2", "warm_start.batch_size=4"),
)


@pytest.mark.parametrize("schema", [2, 1])
def test_an_adapter_goes_on(schema: int, tmp_path: Path) -> None:
    """It has all that a checkpoint can have: an optimizer, a reference that moves, and an unfinished step."""
    whole, again = Case(tmp_path / "whole"), Case(tmp_path / "again")
    whole.run(*ADAPTER)
    if schema == 1:
        downgrade(whole.checkpoint("checkpoint-1-update1"))
    names = {path.name for path in whole.checkpoint("checkpoint-1-update1").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    place = f"trainer.resume_from_checkpoint={whole.checkpoint('checkpoint-1-update1')}"
    again.run(*ADAPTER, place)
    newest = (f"checkpoint-2/{name}.safetensors" for name in ("optimizer", "reference"))
    for file in ("final/adapter_model.safetensors", *newest):
        assert (again.folder / file).read_bytes() == (whole.folder / file).read_bytes(), file
    assert read_state(again.checkpoint("checkpoint-2")).segment == 1
    settings = json.loads((whole.checkpoint("checkpoint-2") / "adapter_config.json").read_text())
    assert settings["r"] == 4
