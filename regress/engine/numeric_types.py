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
    constructors, and what ``tensor.backward()``, ``torch.autograd.backward`` and ``torch.autograd.grad`` run in this
    thread, such as the second forward pass of activation checkpointing. Other threads, which run backward passes on
    GPUs, need the mode as the checkpoint's ``context_fn``
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
            return self._backward(args, **_renamed(kwargs or {}))
        if func is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            return self._grad(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_widen(value) for value in args)
        return func(*args, **{key: _widen(value) for key, value in (kwargs or {}).items()})

    def _backward(self, roots: tuple[Any, ...], *, inputs: Any = None, **named: Any) -> None:
        """Run a backward pass within the mode, which torch leaves while the mode handles a call with tensors.

        Edges of the graph are not handled by a mode again; no edge says where a tensor amid the graph keeps its `grad`.
        """
        into = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        if not _requires_grad(*roots, *into) or any(getattr(one, "grad_fn", None) for one in into):
            return torch.autograd.backward(roots, inputs=inputs, **named)
        with self:
            return torch.autograd.backward(_edges(roots), inputs=_edges(into) or None, **named)

    def _grad(
        self, outputs: tuple[Any, ...], inputs: tuple[Any, ...], materialize_grads: bool = False, **named: Any
    ) -> tuple[Any, ...]:
        """Return the gradients by some tensors, as `_backward` runs."""
        if not _requires_grad(*outputs, *inputs):
            return torch.autograd.grad(outputs, inputs, **named)
        if materialize_grads:
            named["allow_unused"] = True
        with self:
            found = torch.autograd.grad(_edges(outputs), _edges(inputs), **named)
        if not materialize_grads:
            return found
        zeros = (torch.zeros_like(one, requires_grad=bool(named.get("create_graph"))) for one in inputs)
        return tuple(zero if one is None else one for zero, one in zip(zeros, found, strict=True))


def _renamed(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``tensor.backward()`` as ``torch.autograd.backward`` calls them."""
    return {"grad_tensors" if name == "gradient" else name: value for name, value in named.items()}


def _requires_grad(*ends: Any) -> bool:
    """Return False where torch has to say that something has no gradient."""
    return all(getattr(one, "requires_grad", True) for one in ends)


def _edges(ends: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(get_gradient_edge(one) if isinstance(one, torch.Tensor) else one for one in ends)


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
