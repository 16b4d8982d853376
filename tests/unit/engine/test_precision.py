"""A float64 run holds no float32 number anywhere between token ids and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regress.engine.config.schema import ModelConfig
from regress.engine.models import build_model
from regress.engine.precision import TrueFloat64, arithmetic

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Watch(TorchDispatchMode):
    """Notes every operation that yields a number narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW for leaf in tree_leaves(out)):
            self.narrow.append(str(func))
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt2"])
def test_no_operation_of_a_float64_model_is_narrower(family: str, attention: str, checkpointing: bool) -> None:
    config = ModelConfig(
        family=family, dtype="float64", attn_implementation=attention, gradient_checkpointing=checkpointing
    )
    model = build_model(config, seed=0, vocab_size=16, pad_id=0, eos_id=1)
    for name, buffer in model.named_buffers():
        assert buffer.dtype not in NARROW, name
    watch = Watch()
    with watch, arithmetic(model.dtype):
        model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False).logits.sum().backward()
    assert watch.narrow == []


def test_the_watch_sees_what_double_alone_leaves_in_float32() -> None:
    model = build_model(ModelConfig(dtype="float64"), seed=0, vocab_size=16, pad_id=0, eos_id=1)
    watch = Watch()
    with watch:
        model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
    assert watch.narrow


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
