"""Replacements by which megatron-core runs on a CPU with gloo; none of them computes a number, but `Norm`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _device

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn", "as_tensor")


class _Stream:
    """Stream and event of a device that has none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def cuda_on_cpu() -> None:
    """Have what Megatron asks of CUDA answered by the CPU: its device, streams and random states."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *args: None
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda *args: None
    _device._device_constructors()  # remembers the real ones, which loading on a device needs
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]  # the shim


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = _CPU
        return factory(*args, **options)

    return made


def one_random_state() -> None:
    """Have the tracker of random states leave that of the CPU alone; nothing is drawn, as dropout is 0."""
    from megatron.core.tensor_parallel import random

    @contextlib.contextmanager
    def fork(self: Any, name: str | None = None) -> Iterator[None]:
        yield

    random.CudaRNGStatesTracker.fork = fork
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **options: None


def named_as_cuda() -> None:
    """Have tensors in float32 name their type as the CUDA one, by which Megatron's optimizers know float32."""
    kind = Tensor.type

    def type_(self: Tensor, *args: Any, **options: Any) -> Any:
        found = kind(self, *args, **options)
        return "torch.cuda.FloatTensor" if found == "torch.FloatTensor" else found

    Tensor.type = type_  # type: ignore[method-assign, assignment]  # the shim


def router_without_engine() -> None:
    """Define the name that the router compares with None, and that is missing without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


class Norm(nn.Module):
    """RMS norm of torch, whose weight is marked as one for sequence parallelism.

    Megatron's own wrapper of torch's norm refuses sequence parallelism, and its other norms need CUDA.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as Megatron marks it
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalized states."""
        return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
