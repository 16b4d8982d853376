"""Models of any family of transformers: what the engine computes of them, and what it refuses by its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from regress.cli import main

SMALL = (
    "model.config={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4}",
    "data.prompts_per_step=2",
    "data.group_size=2",
    "data.max_completion_length=4",
)


def trained(folder: Path, code: int, *overrides: str) -> str:
    """Return the last line of what a run says."""
    arguments = ["train", *SMALL, "max_steps=1", f"output_dir={folder}", *overrides]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    return str(result.output).splitlines()[-1]


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(one, marks=pytest.mark.extended)
            for one in ("qwen2", "phi", "olmo2", "gpt_neox", "opt")
        ),
    ],
)
def test_a_tiny_model_of_any_family_is_trained(family: str, tmp_path: Path) -> None:
    trained(tmp_path, 0, f"model.family={family}", "model.dtype=float64", "batching.layout=packed")


REFUSED = {
    "learned positions, fewer than tokens": (
        ("model.family=opt", "model.config.max_position_embeddings=40"),
        "error: data.max_seq_length=48: the model has 40 positions (max_position_embeddings); lower "
        "data.max_seq_length or give a model with more",
    ),
    "varlen, and scores with a soft cap": (
        ("model.family=gemma2", "model.attn_implementation=varlen"),
        "error: model.attn_implementation=varlen computes plain attention, and Gemma2Attention asks for softcap "
        "besides; set model.attn_implementation=eager and parallel.cp=1",
    ),
    "biases by distance, which no mask of pairs can be laid over": (
        ("model.family=bloom",),
        "error: model: BloomForCausalLM does not take the masks and positions of the engine (ValueError: too many "
        "values to unpack (expected 2)); give a causal language model whose forward takes attention masks of "
        "[B, 1, T, T] and position_ids",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name: str, tmp_path: Path) -> None:
    overrides, sentence = REFUSED[name]
    assert trained(tmp_path, 2, *overrides) == sentence


def test_what_leaves_float64_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Qwen2MLP.forward

    def coarse(self: Qwen2MLP, x: Tensor) -> Tensor:
        return right(self, x.to(torch.bfloat16).to(x.dtype))

    monkeypatch.setattr(Qwen2MLP, "forward", coarse)
    said = trained(tmp_path / "a", 2, "model.family=qwen2", "model.dtype=float64")
    assert said.startswith("error: model: aten._to_copy in model.layers.0.mlp (")
    assert f"{Path(__file__).name}:{coarse.__code__.co_firstlineno + 1}) gives bfloat16 inside of the" in said
    trained(tmp_path / "b", 0, "model.family=qwen2")


def test_a_state_that_crosses_packed_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over all columns before: a sample that is alone in its row has only its own."""
    right = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, x: right(self, x + x.cumsum(1)))

    said = trained(tmp_path / "a", 2, "model.family=qwen2", "batching.layout=packed")
    assert said.startswith(
        "error: batching.layout=packed: log-probs of two samples that Qwen2ForCausalLM computes"
    )
    assert "its state crosses the border of packed samples; set batching.layout=padded" in said
    trained(tmp_path / "b", 0, "model.family=qwen2", "max_steps=0")
