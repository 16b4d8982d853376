"""The output head as a function: logits of hidden states, as the model computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regress.capture.linear_head import LinearHead
from regress.capture.model_structure import Anatomy, Head, is_distributed, whole
from regress.errors import CaptureError

AGREE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Allowed distance of recomputed logits from the model's own, relative to the largest; 0.05 for other dtypes."""


def make_head(anatomy: Anatomy) -> Head:
    """Build the function from hidden states ``[K, H]`` to logits ``[K, V]``, scale and soft cap included.

    It reads the parameters as they are now: call it anew for each forward pass. It uses no random numbers and calls
    no hooks. The weight of a tensor-parallel head is put together on each rank of its mesh.
    """
    head = anatomy.parts[1]
    project = _project(head) if isinstance(head, nn.Module) else head
    finish = _finish(anatomy.root) if isinstance(head, nn.Module) else None

    def logits(hidden: Tensor) -> Tensor:
        found = project(hidden)
        return found if finish is None else finish(found)

    return logits


def solver_head(anatomy: Anatomy) -> Head:
    """Build the same function for float64 states, differentiable in them, as the token gradient needs it."""
    head = anatomy.parts[1]
    weight = getattr(head, "weight", None)
    if isinstance(head, nn.Module) and isinstance(weight, Tensor) and _is_linear(head, weight):
        bias = getattr(head, "bias", None)
        factor, cap = _scaling(anatomy.root)
        full_bias = whole(bias.detach()) if isinstance(bias, Tensor) else None
        return LinearHead(whole(weight.detach()), full_bias, scale=factor, soft_cap=cap)
    native = make_head(anatomy)
    parameters = head.parameters() if isinstance(head, nn.Module) else anatomy.root.parameters()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    return lambda states: native(states.to(dtype)).to(states.dtype)


def _is_linear(head: nn.Module, weight: Tensor) -> bool:
    plain = type(head).forward in (nn.Linear.forward, nn.Embedding.forward)
    return weight.dim() == 2 and (plain or is_distributed(weight))


def _project(head: nn.Module) -> Head:
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and _is_linear(head, weight):
        bias = getattr(head, "bias", None)
        full = whole(weight.detach())
        full_bias = whole(bias.detach()) if isinstance(bias, Tensor) else None
        own_forward = head.__dict__.get("forward")
        if own_forward is not None and not is_distributed(weight):
            return own_forward  # type: ignore[no-any-return]  # a head that computes in another dtype, for instance
        return lambda hidden: functional.linear(hidden.to(_dtype(full)), full, full_bias)

    def call(hidden: Tensor) -> Tensor:
        with _without_dropout(head):
            return head.forward(hidden)  # type: ignore[no-any-return]  # a module's forward is Any

    return call


def _dtype(weight: Tensor) -> torch.dtype:
    return weight.dtype


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _finish(root: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return scale and soft cap as a function of logits; None where there are none."""
    factor, cap = _scaling(root)
    if factor == 1.0 and not cap:
        return None

    def finish(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return finish


def _scaling(root: nn.Module) -> tuple[float, float | None]:
    """Return the factor on the logits and their bound, as Hugging Face models apply them to the output of the head."""
    config: Any = getattr(root, "config", None)
    text = getattr(config, "text_config", None) or config
    scale = getattr(root, "logit_scale", None)  # Cohere
    divide = getattr(text, "logits_scaling", None)  # Granite
    multiply = getattr(text, "lm_head_multiplier", None)  # Falcon-H1
    cap = getattr(text, "final_logit_softcapping", None)  # Gemma
    factor = 1.0
    for value, exponent in ((scale, 1), (divide, -1), (multiply, 1)):
        if isinstance(value, int | float):
            factor *= float(value) ** exponent
    return factor, float(cap) if isinstance(cap, int | float) and cap else None


def check_logits(own: Tensor, ours: Tensor, name: str) -> None:
    """Compare a row of the model's own logits with what the head makes of the hidden state.

    Args:
        own: ``[..., V]`` logits as returned by the model, perhaps in a finer dtype than they were computed in.
        ours: ``[1, V]`` logits of the last hidden state.

    Raises:
        CaptureError: if they are not the same, so that log-probs would be those of another distribution.
    """
    last = own.detach().reshape(-1, own.shape[-1])[-1:]
    if ours.shape != last.shape:
        raise CaptureError(f"""the head of {name} gives {ours.shape[-1]} logits, but the model returned
        {last.shape[-1]}: give the function that it applies to its last hidden state with record(head=...)""")
    finite = torch.isfinite(last) & torch.isfinite(ours)
    gap = ((ours.double() - last.double()).abs() * finite).max().item()
    size = (last.double().abs() * finite).max().item()
    if gap > max(AGREE.get(dtype, 0.05) for dtype in (last.dtype, ours.dtype)) * max(size, 1e-30):
        raise CaptureError(f"""the logits of {name} are not its head applied to the last hidden state (they differ by
        {gap:.3g}, the largest is {size:.3g}): give the function that it applies with record(head=...)""")
