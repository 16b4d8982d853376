"""The output head of a model as a function that float64 states can pass, without a float64 copy of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
