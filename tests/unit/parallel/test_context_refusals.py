"""Refusals of context parallelism: heads, models, queries and columns that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.errors import ConfigError
from regress.layout import TokenLayout
from regress.parallel import context_parallel


def model_of(family: str, **config: Any) -> PreTrainedModel:
    return build_model(ModelConfig(family=family, config=config), seed=3, vocab_size=13, pad_id=0, eos_id=1)


def test_ulysses_needs_heads_for_every_rank() -> None:
    model = model_of("llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    with pytest.raises(ConfigError) as caught:
        context_parallel.apply(model, "ulysses", 3)
    assert str(caught.value) == (
        "parallel.cp=3: ulysses shares heads and the model has 4 attention heads; choose a divisor of 4, or "
        "parallel.cp_method=ring or all_gather"
    )
    with pytest.raises(ConfigError, match=r"has 2 attention heads \(of each of 2 tensor-parallel ranks\)"):
        context_parallel.apply(model, "ulysses", 4, tp=2)
    context_parallel.apply(model, "ring", 3)


@pytest.mark.parametrize("method", context_parallel.METHODS)
def test_a_model_called_without_a_context_is_refused(method: str) -> None:
    model = model_of("gpt2", n_embd=32, n_head=4, n_layer=2)
    context_parallel.apply(model, method, 2)
    with pytest.raises(
        ValueError, match=r"^GPT2Attention got no context: it was called without one \(sampling cannot"
    ):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("method", context_parallel.METHODS)
def test_queries_that_are_not_the_contexts_columns_are_refused(method: str) -> None:
    segments = context_parallel.ContextSegments(TokenLayout((1, 8), ()), torch.arange(8).view(2, 4))
    states = torch.zeros(1, 2, 8, 4)
    with pytest.raises(
        ValueError, match=r"shape \[B, T\]=\[1, 8\] meet a context of \[1, 4\]; give the model the"
    ):
        context_parallel.METHODS[method](torch.nn.Module(), states, states, states, None, context=segments)


@pytest.mark.parametrize(
    "columns",
    [
        [[(0, 4)], [(3, 7)]],  # a column twice
        [[(0, 3)], [(3, 6)]],  # two columns on no rank
        [[(0, 5)], [(5, 8)]],
        [[(0, 8)], []],
    ],
)
def test_columns_that_are_no_split_are_refused(columns: Any) -> None:
    with pytest.raises(ValueError, match="each once") as caught:
        context_parallel.ContextSegments.of(TokenLayout((1, 8), ()), columns, None, torch.device("cpu"))
    assert str(caught.value) == (
        f"the column ranges {columns} of 2 ranks are not equal shares of 8 columns, each once; pad rows to a "
        "multiple of the ranks and split them without overlap"
    )
