"""Numeric types of a run, and float64 that stays float64 everywhere.

``model.double()`` is not a float64 model: Hugging Face modules cast normalization, rotary embeddings,
softmax and router scores to float32 whatever the weights are. :class:`TrueFloat64` rewrites those requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class TrueFloat64(TorchFunctionMode):
    """Mode in which every explicit request for float32 is a request for float64.

    Covers ``tensor.float()``, ``tensor.to(torch.float32)``, ``softmax(..., dtype=torch.float32)`` and tensor
    constructors, and what ``tensor.backward()`` runs in this thread, such as the second forward pass of activation
    checkpointing. Other threads, which run backward passes on GPUs, need the mode as the checkpoint's ``context_fn``
    (see :func:`checkpoint_contexts`).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_widen(value) for value in args)
        return func(*args, **{key: _widen(value) for key, value in (kwargs or {}).items()})

    def _backward(self, root: torch.Tensor, gradient: torch.Tensor | None = None, **named: Any) -> None:
        """Run a backward pass within the mode, which torch leaves while the mode handles a call with tensors."""
        start = get_gradient_edge(root) if root.requires_grad else root
        with self:
            torch.autograd.backward(start, gradient, **named)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def true_float64() -> Iterator[None]:
    """Compute in float64 wherever float32 is the default or is asked for.

    Enter it around the whole of a training run, forward and backward passes included: tensors made inside
    from Python numbers are float64, and so is every explicit cast to float32. Existing weights and inputs
    stay unchanged: load them inside, or call ``model.double()``. The mode applies to the thread that enters
    it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with TrueFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def arithmetic(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context in which a model of this dtype has to run."""
    return TrueFloat64() if dtype == torch.float64 else nullcontext()


def checkpoint_contexts(
    dtype: torch.dtype,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the ``context_fn`` of ``torch.utils.checkpoint``: the recompute uses the arithmetic of the forward."""
    return nullcontext(), arithmetic(dtype)
