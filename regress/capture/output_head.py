"""The output head as a function: logits of hidden states, as the model computes them.

Float64 states pass a linear head without a float64 copy of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from regress.capture.model_structure import Anatomy, Head, is_distributed, whole
from regress.errors import CaptureError

PIECE = 1 << 22
"""Most elements of the weights that are held in the dtype of the states at once."""

STEEP = 0.1
"""Slope of a soft cap above which errors of its argument show in the logits."""


class LinearHead:
    """Map states ``[K, H]`` to logits ``[K, V]`` in the dtype of the states: scaled and soft-capped linear head.

    ``logits = cap * tanh(scale * (x W^T + bias) / cap)``; without `soft_cap` it is the linear part alone. Weights are
    converted piece by piece, forwards and backwards, so that no second copy of them exists.

    Args:
        weight_VH: weights of the head, of any floating dtype; the embeddings themselves where they are tied.
        bias_V: its bias, or None.
        scale: factor on the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        soft_cap: bound of the logits (Gemma's ``final_logit_softcapping``), or None.
    """

    def __init__(
        self,
        weight_VH: Tensor,
        bias_V: Tensor | None = None,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self._weight = weight_VH.detach()
        self._bias = None if bias_V is None else bias_V.detach()
        self._scale = scale
        self._soft_cap = soft_cap

    def __call__(self, states_KH: Tensor) -> Tensor:
        """Return the logits ``[K, V]``, differentiable in the states."""
        logits: Tensor = _Linear.apply(states_KH, self._weight)
        if self._bias is not None:
            logits = logits + self._bias.to(logits.dtype)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._soft_cap is not None:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return logits

    def slope_error(self, logits: Tensor, rounded: Tensor, u: float) -> Tensor | None:
        """Bound the relative rounding error of d logit / d (linear part), ``[K, V]``; None where it is a constant.

        Args:
            logits: as returned, in float64; ``rounded`` in the dtype whose error is asked for.
            u: half of the spacing of that dtype.

        Source: the derivative ``1 - t * t`` of ``t = tanh(x)``: t is rounded to 2 u, its square and the difference to u
        each, and an error of x moves it by ``2 t`` times that; the error of x is the one that logits in the steep part
        show, where there are some, and a product and a quotient round it once more.
        """
        if self._soft_cap is None:
            return None
        t = (logits / self._soft_cap).clamp(-1 + 1e-16, 1 - 1e-16)
        slope = 1 - t * t
        shown = torch.where(slope > STEEP, (rounded - logits).abs() / (self._soft_cap * slope), 0.0)
        of_x = shown.amax(-1, keepdim=True) + 2 * u * torch.atanh(t).abs()
        return 6 * u / slope + 2 * t.abs() * of_x

    def pulled_squares(self, cotangent: Tensor, logits: Tensor) -> Tensor:
        """Return ``sum_v (J_vj c_v)^2``, ``[K, H]``: the squares of what the product of a backward pass adds up.

        Args:
            cotangent: c, ``[K, V]``, the gradient by the logits.
            logits: as returned, in float64.
        """
        factor = cotangent * self._scale
        if self._soft_cap is not None:
            factor = factor * (1 - (logits / self._soft_cap).square())
        factor = factor.square_()
        out = factor.new_zeros(factor.shape[0], self._weight.shape[1])
        for rows in _pieces(self._weight):
            out += factor[:, rows] @ self._weight[rows].to(factor.dtype).square()
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        logits = states.new_empty(states.shape[0], weight.shape[0])
        for rows in _pieces(weight):
            logits[:, rows] = states @ weight[rows].to(states.dtype).T
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        out = grad.new_zeros(grad.shape[0], weight.shape[1])
        for rows in _pieces(weight):
            out += grad[:, rows] @ weight[rows].to(grad.dtype)
        return out, None


def _pieces(weight: Tensor) -> list[slice]:
    step = max(1, PIECE // max(weight.shape[1], 1))
    return [slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step)]


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
