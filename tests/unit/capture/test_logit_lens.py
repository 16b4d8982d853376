"""The log-prob that the state after each layer implies: the layer that a fault sits in is the first that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from capture_loops import VOCABULARY, compare, recorded, tiny_model
from click.testing import CliRunner
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import regress
from regress.cli import main
from regress.compare.logit_lens import logit_lens

SCHEMA = Path(regress.__file__).parent / "report/report.schema.json"


def gpt2() -> nn.Module:
    """Return a model with means in its norms, shifts, and a head that is the table of embeddings."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, pad_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    nn.init.normal_(model.transformer.ln_f.bias)
    return model


def capped() -> nn.Module:
    """Return a model whose logits are not its head applied to the last state."""
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = Gemma2Config(
        vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=1, pad_token_id=0, **small
    )
    config.final_logit_softcapping, config.initializer_range = 1.0, 0.5
    return Gemma2ForCausalLM(config)


def record_of(folder: Path, model: nn.Module, wrong: str = "", **how: Any) -> Path:
    """Record a training, perhaps with the output of a module a hundredth too large."""
    if wrong:
        model.get_submodule(wrong).register_forward_hook(lambda module, inputs, output: output * 1.01)
    options: dict[str, Any] = {
        "token_gradient": True,
        "initial_weights": True,
        "activations": r"(layers\.\d+|h\.\d+|norm|ln_f|embed_tokens|wte)$",
    }
    recorded(folder, model, updates=1, options={**options, **how.pop("options", {})}, **how)
    return folder


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layout", "accumulation"), [("right", 1), ("packed", 1), ("left", 4), ("packed", 2)]
)
def test_the_layer_with_the_fault_is_the_first_that_differs(
    tmp_path: Path, layout: str, accumulation: int
) -> None:
    golden = record_of(tmp_path / "a", tiny_model())
    actual = record_of(
        tmp_path / "b", tiny_model(), "model.layers.1.mlp", layout=layout, accumulation=accumulation
    )
    lens = logit_lens(compare(golden, actual))
    assert lens is not None
    assert lens.first == "model.layers.1"
    embedding, before, after, log_probs = lens.layers
    assert max(embedding.largest, before.largest) < 1e-5
    assert after.largest > 1e-3
    assert after.largest == pytest.approx(log_probs.largest, rel=1e-3)
    assert after.golden == pytest.approx(log_probs.golden, abs=1e-5)
    assert after.where == log_probs.where
    assert (lens.tokens, lens.place) == (lens.of, "step0")


def test_norms_that_subtract_means_and_tied_heads(tmp_path: Path) -> None:
    golden, actual = (
        record_of(tmp_path / "a", gpt2()),
        record_of(tmp_path / "b", gpt2(), "transformer.h.1.mlp"),
    )
    lens = logit_lens(compare(golden, actual))
    assert lens is not None
    assert lens.first == "transformer.h.1"
    assert lens.layers[-2].golden == pytest.approx(lens.layers[-1].golden, abs=1e-5)


def test_there_is_no_lens_without_what_it_needs(tmp_path: Path) -> None:
    def found(name: str, model: Any, wrong: str = "model.layers.1.mlp", **options: Any) -> Any:
        sides = [record_of(tmp_path / f"{name}{at}", model(), at, options=options) for at in ("", wrong)]
        report = compare(*sides)
        assert report.exit_code == 1
        return logit_lens(report)

    assert found("weights", tiny_model, initial_weights=False) is None
    assert found("norm", tiny_model, activations=r"layers\.\d+$") is None
    assert found("capped", capped, "model.layers.1.post_feedforward_layernorm") is None
    same = [record_of(tmp_path / side, tiny_model()) for side in ("c", "d")]
    assert logit_lens(compare(*same)) is None


def test_the_command_and_its_report_show_it(tmp_path: Path) -> None:
    golden, actual = (
        record_of(tmp_path / "a", tiny_model()),
        record_of(tmp_path / "b", tiny_model(), "model.layers.0.mlp"),
    )
    done = CliRunner().invoke(
        main, ["compare", str(golden), str(actual), "--report", str(tmp_path / "report")]
    )
    assert done.exit_code == 1
    assert "in nats (step0, mean of 45 tokens):" in done.output
    assert "they first differ after model.layers.0" in done.output
    tree = json.loads((tmp_path / "report" / "report.json").read_text())
    jsonschema.validate(tree, json.loads(SCHEMA.read_text()))
    assert [layer["layer"] for layer in tree["lenses"]["compare"]["layers"]] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "log_probs",
    ]
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Log-probs by layer: compare" in page
