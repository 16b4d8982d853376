"""A float64 run holds no float32 number anywhere between token ids and gradients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from regress.dump.precision import Float64Watch
from regress.engine.config.schema import ModelConfig
from regress.engine.models import build_model
from regress.engine.precision import TrueFloat64, arithmetic

NARROW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "gpt2"])
def test_no_operation_of_a_float64_model_is_narrower(
    family: str, attention: str, checkpointing: bool
) -> None:
    config = ModelConfig(
        family=family, dtype="float64", attn_implementation=attention, gradient_checkpointing=checkpointing
    )
    model = build_model(config, seed=0, vocab_size=16, pad_id=0, eos_id=1)
    for name, buffer in model.named_buffers():
        assert buffer.dtype not in NARROW, name
    watch = Float64Watch(model)
    with watch, arithmetic(model.dtype):
        model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False).logits.sum().backward()
    assert watch.narrow == []


def test_the_watch_names_what_double_alone_leaves_in_float32() -> None:
    model = build_model(ModelConfig(dtype="float64"), seed=0, vocab_size=16, pad_id=0, eos_id=1)
    watch = Float64Watch(model)
    with watch:
        logits = model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False).logits
        loss = logits.float().mean().double()
        loss.backward()
    rotary, *_, outside = [one for one in watch.narrow if not one.backward]
    assert re.fullmatch(
        r"aten\._to_copy in model\.rotary_emb \(transformers/models/qwen3/modeling_qwen3\.py:\d+\)",
        str(rotary),
    )
    assert {one.module for one in watch.inside} >= {"model.layers.0.input_layernorm", "model.norm"}
    assert outside.module is None
    assert Path(__file__).name in outside.line
    backward = [one for one in watch.narrow if one.backward]
    assert backward
    assert not set(backward) & set(watch.inside)


def test_the_watch_leaves_whole_numbers_alone_and_names_what_fails() -> None:
    watch = Float64Watch()
    with watch:
        mask = torch.ones(2, 3).tril().masked_fill(torch.eye(2, 3) > 0, torch.finfo(torch.float32).min)
        torch.empty(3)
        _ = torch.ones(2, 3, dtype=torch.float64) + mask
        with pytest.raises(RuntimeError):
            torch.ones(2, 3, dtype=torch.float64) @ torch.ones(2, 3, dtype=torch.float64)
    assert watch.narrow == []
    assert watch.failed is not None
    assert watch.failed.name == "aten.mm"


def test_requests_for_float32_become_float64() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with TrueFloat64():
        made = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.type(torch.float32),
            nn.functional.softmax(x, dim=0, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
        ]
    assert [tensor.dtype for tensor in made] == [torch.float64] * 6


def test_other_dtypes_run_as_they_are() -> None:
    with arithmetic(torch.bfloat16):
        assert torch.ones(1).float().dtype == torch.float32
