"""A float64 run holds no float32 number anywhere between token ids and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regress.dump.float64_watch import Float64Watch
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import TrueFloat64, arithmetic, true_float64

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


class Cast(torch.autograd.Function):
    """A factor of 2 whose backward passes ask for float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        seen.append(gradients[0].to(torch.float32).dtype)
        return Cast.apply(gradients[0])  # type: ignore[no-any-return]  # torch types it as anything


seen: list[torch.dtype] = []
"""Dtypes that `Cast` and a checkpoint were given."""


def inner(x: torch.Tensor) -> torch.Tensor:
    narrow = Cast.apply(x).to(torch.float32)
    seen.append(narrow.dtype)
    return (narrow**3).sum()


def backwards(x: torch.Tensor) -> list[Callable[[torch.Tensor], object]]:
    """All ways to ask for gradients of one value by ``x``."""
    return [
        lambda y: y.backward(),
        lambda y: y.backward(inputs=[x]),
        lambda y: y.backward(torch.ones(()), retain_graph=True),
        lambda y: torch.autograd.backward(y),
        lambda y: torch.autograd.backward([y], inputs=x),
        lambda y: torch.autograd.grad(y, x),
        lambda y: torch.autograd.grad(y, {"x": x}),
        lambda y: torch.autograd.grad(y, [x, torch.ones(2, requires_grad=True)], materialize_grads=True),
        lambda y: torch.autograd.grad(y, x, torch.ones(3), is_grads_batched=True),
        lambda y: torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True)[0].sum(), x),
        lambda y: torch.autograd.grad(y, x, create_graph=True)[0].sum().backward(),
    ]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", range(11))
def test_every_backward_pass_stays_in_float64(way: int, checkpointed: bool) -> None:
    with true_float64():
        x = torch.linspace(1, 2, 3).requires_grad_()
        seen.clear()
        y = checkpoint(inner, x, use_reentrant=False) if checkpointed and way != 8 else inner(x)
        backwards(x)[way](y)
    assert len(seen) >= 2 + (checkpointed and way != 8)
    assert set(seen) == {torch.float64}


def test_gradients_within_the_mode_are_those_without() -> None:
    found = []
    for mode in (nullcontext(), true_float64()):
        with mode:
            x = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
            unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
            made: list[torch.Tensor | None] = [
                *torch.autograd.grad((x**3).sum(), [x, unused], allow_unused=True)
            ]
            made += torch.autograd.grad([x.sum(), (x**2).sum()], [x, unused], materialize_grads=True)
            made.append(torch.autograd.functional.hessian(lambda v: (v**4).sum(), x.detach()))
            amid = x * 3
            (amid**2).sum().backward(inputs=[amid])
            made += [amid.grad, x.grad]
            with pytest.raises(RuntimeError, match="not have been used"):
                torch.autograd.grad(x.sum(), [x, unused])
            with pytest.raises(RuntimeError, match="does not require grad"):
                torch.autograd.grad(x.sum(), [x, torch.ones(2)])
            found.append(made)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_the_watch_names_what_leaves_float64_in_a_gradient_that_is_asked_for() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    watch = Float64Watch()
    with watch:
        (first,) = torch.autograd.grad((Cast.apply(x) / 3).sum(), x, create_graph=True)
    (found,) = watch.narrow
    assert found.backward
    assert found.line is not None
    assert Path(__file__).name in found.line
    assert first.dtype == torch.float64
