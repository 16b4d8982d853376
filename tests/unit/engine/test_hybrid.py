"""Models with layers of linear attention, whose state runs along the row: true float64, and what the engine refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import regress
from regress.cli import main

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 24,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_next": {"num_experts": 0}, "qwen3_5_text": {}}
TOKENS = torch.arange(66)[None] % 23 + 1  # more than one chunk of the gated delta rule, which are of 64


def hybrid(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).double().train()
    return model


def token_by_token(model: PreTrainedModel) -> Tensor:
    """Logits by the recurrence itself, which keeps its state in a cache."""
    cache: Any = None
    found: list[Tensor] = []
    for token in TOKENS.T:
        out = model(input_ids=token[None], past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [*found, out.logits]
    return torch.cat(found, 1)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_delta_rule_is_float64_in_chunks_and_token_by_token(family: str) -> None:
    """Two algorithms, one of which would not see the rounding of the other."""
    model = hybrid(family)
    with torch.no_grad():
        double = model(input_ids=TOKENS, use_cache=False).logits
        with regress.true_float64():
            chunks, steps = model(input_ids=TOKENS, use_cache=False).logits, token_by_token(model)
    assert distance(chunks, steps) < 1e-13
    assert distance(double, steps) > 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_forward_pass_within_the_backward_pass_is_float64_too(family: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = hybrid(family)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with regress.true_float64():
            model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
    assert distance(found[1], found[0]) < 1e-14


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (
            "compiled",
            "would compile linear attention, which runs sample by sample, anew for every layout",
        ),
        pytest.param("cp2", "splits a sample over ranks, and linear attention", marks=pytest.mark.extended),
        pytest.param("tp2", "cannot be split by tensor parallelism", marks=pytest.mark.extended),
        pytest.param("tp2-hf", "does not divide num_key_value_heads=1", marks=pytest.mark.extended),
        pytest.param("pp2", "cannot be cut into stages", marks=pytest.mark.extended),
    ],
)
def test_layouts_that_would_part_a_state_are_refused(variant: str, why: str) -> None:
    shown = CliRunner().invoke(main, ["replay", "hybrid", "--variants", variant])
    assert shown.exit_code
    assert why in shown.output
