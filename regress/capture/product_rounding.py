"""Rounding of the gradient by the logits, term by term, and of its product with the head.

u is half of the spacing of a dtype throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 3
"""Roundings of an element of the gradient by the logits by itself: its last difference, and its products with the
factor of the logits and with the temperature."""

SHARED = 3
"""Roundings that all elements share: the constants of these two products, and the factor from further up."""

CERTAIN = 6.0
"""Standard deviations at which an error that is a sum of independent roundings is bounded."""


def sum_unit(dtype: torch.dtype) -> float:
    """Return half of the spacing of the dtype that sums are taken in: float32 at least."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2


def own_rounding(
    p: Tensor, log_p: Tensor, entropy: Tensor, terms: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Bound the rounding of the terms of ``c = g (e_t - p) - h p (log p + H)`` by backpropagation, for g = 1 and h = 1.

    Backpropagation never has ``log p + H``. It adds ``-h p log p`` (two products) and ``-h p`` (one), and takes from
    that p times the sum over the vocabulary, which is ``g - h (1 - H)`` with terms of the absolute sum ``1 + H``. So
    terms cancel, and their own sizes count.

    Args:
        p: probabilities ``[K, V]``; `log_p` their logarithms, `entropy` ``[K, 1]`` in nats.
        terms: V, ``[K, 1]``.

    Returns:
        Bounds ``[K, V]`` of what all elements have in common (the rounded sum), and of the independent roundings of
        each, one standard deviation of a uniform error times the root of 3; a part of g and one of h for both.
    """
    u, tree = torch.finfo(dtype).eps / 2, terms.log2() * sum_unit(dtype)
    size = 3 * torch.where(p > 0, log_p.square(), 0.0) + 2 + 3 * (1 + entropy).square()
    return (p * (u + tree), p * (u + tree) * (1 + entropy)), (2**0.5 * u * p, u * p * size.sqrt())


def product_noise(pulled: Tensor, squares: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the rounding of each element of ``J^T c``, a sum of V products, ``[K, H]``.

    The error of a sum is ``sum_k u_k s_k`` over its partial sums s_k, with independent u_k, uniform up to u. As the
    order of a vocabulary says nothing about the terms, partial sums run from 0 to the sum d like a random bridge of
    the variance ``q^2 k/V (1 - k/V)``, where q^2 is the sum of the squared terms, so that the sum of the squared s_k is
    about ``V (d^2 / 3 + q^2 / 6)``. Sums are taken in float32 at least, products in the dtype itself.

    Args:
        pulled: d, ``[K, H]``.
        squares: q^2, ``[K, H]``.
        terms: V, ``[K, 1]``.

    Source: Ipsen and Zhou, Probabilistic error analysis for inner products (arXiv 1906.10465), whose bound is that of
    the partial sums.
    """
    u = torch.finfo(dtype).eps / 2
    variance = sum_unit(dtype) ** 2 * terms * (pulled.square() / 3 + squares / 6) + u**2 * squares
    return CERTAIN * (variance / 3).sqrt()
