"""Loops of public trainers under `record`: one line each, microbatches that are equal, and two faults that are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_loops import tiny_model
from click.testing import CliRunner
from public_loops import COUNTED_LATE, LOOPS, rollouts
from transformers import Qwen3ForCausalLM

from regress import record
from regress.cli import main
from regress.compare.dumps.comparison import compare_dumps
from regress.dump.dump_reader import DumpReader

UNDIVIDED = "tiny-grpo"
"""The loop whose gradient grows with the number of microbatches."""


def recorded(folder: Path, name: str, size: int) -> str:
    kind, loop = LOOPS[name]
    model = kind()
    with record(folder, model, token_gradient=True):
        loop(model, rollouts(), size)
    return str(folder)


def told(golden: str, actual: str) -> str:
    """Return the output of the command on two dumps that differ, on one line."""
    done = CliRunner().invoke(main, ["compare", golden, actual])
    assert done.exit_code == 1, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("name", [name for name in LOOPS if name != UNDIVIDED])
def test_microbatches_of_any_size_are_the_same_training(tmp_path: Path, name: str) -> None:
    golden = recorded(tmp_path / "8", name, 8)
    for size in (4, 2):
        found = compare_dumps(golden, recorded(tmp_path / str(size), name, size))
        assert found.exit_code == 0, [f"{v.quantity} {v.name}: {v.detail}" for v in found.failed]
        count = {v.quantity: v.count for v in found.verdicts if v.quantity in ("log_probs", "token_gradient")}
        assert len(count) == 2
        assert all(count.values()), count
        assert not found.problems


def test_a_gradient_that_grows_with_the_microbatches_is_named(tmp_path: Path) -> None:
    """AdamW hides it from the parameters."""
    sides = [recorded(tmp_path / str(size), UNDIVIDED, size) for size in (8, 2)]
    assert "a factor that is the number of microbatches" in told(*sides)
    assert not [v for v in compare_dumps(*sides).failed if v.quantity == "param"]


def test_labels_that_are_counted_after_an_edit_are_named(tmp_path: Path) -> None:
    golden = recorded(tmp_path / "right", "nano-aha-moment", 4)
    model = tiny_model()
    with record(tmp_path / "late", model, token_gradient=True):
        COUNTED_LATE(model, rollouts(), 4)
    assert "(rule token-gradient-scale;" in told(golden, str(tmp_path / "late"))


def test_parameters_of_two_optimizers_keep_their_own_settings(tmp_path: Path) -> None:
    dump = DumpReader(recorded(tmp_path / "a", "nanochat", 8))
    (name,) = dump.names("optimizer")
    meta: Any = dump.read(name).meta
    kinds = {name: kind.rpartition(".")[2] for name, kind in meta["optimizer_type"].items()}
    assert kinds == {
        "wte.weight": "AdamW",
        "lm_head.weight": "AdamW",
        "layers.0.weight": "SGD",
        "layers.1.weight": "SGD",
    }
    assert meta["learning_rates"]["layers.0.weight"] == 1e-2
    assert meta["betas"] == [0.9, 0.999]


@pytest.mark.parametrize("name", ["nanochat", "GRPO-Zero"])
def test_own_models_are_read_from_their_logits(tmp_path: Path, name: str) -> None:
    recorded(tmp_path / "a", name, 4)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["config"]["capture"]["read_from"] == "logits"


class Remembering(Qwen3ForCausalLM):
    """Keeps slower rotary frequencies after it generated, as those do that grow with the longest sequence."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, and slow the frequencies down."""
        found = super().generate(*args, **kwargs)
        self.model.rotary_emb.inv_freq *= 0.9
        return found


@pytest.mark.parametrize(("kind", "same"), [(Qwen3ForCausalLM, True), (Remembering, False)])
def test_what_generation_leaves_in_the_model_is_seen(tmp_path: Path, kind: Any, same: bool) -> None:
    """A scoring forward after `generate` on the same module equals that of a fresh one, or is a difference."""
    for first in (False, True):
        model = kind(tiny_model().config)
        model.load_state_dict(tiny_model().state_dict())
        with record(tmp_path / str(first), model, token_gradient=True):
            if first:
                prompt = rollouts().prompts[0][None]
                mask = torch.ones_like(prompt)
                model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=True)
            LOOPS["simple_GRPO"][1](model, rollouts(), 4)
    found = compare_dumps(str(tmp_path / "False"), str(tmp_path / "True"))
    assert (found.exit_code == 0) is same
    assert bool([v for v in found.failed if v.quantity == "log_probs"]) is not same
