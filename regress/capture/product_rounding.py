"""Rounding of the gradient by the logits, term by term, and of its product with the head.

u is half of the spacing of a dtype throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTORS = 6
"""Roundings by which an element of the gradient by the logits is wrong as a whole: its last difference, the factor
of the logits and its constant, the temperature and its constant, and the factor from further up."""

CERTAIN = 6.0
"""Standard deviations at which an error that is a sum of independent roundings is bounded."""


def own_rounding(p: Tensor, log_p: Tensor, entropy: Tensor, terms: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Bound the rounding of the terms of ``c = g (e_t - p) - h p (log p + H)`` by backpropagation, for g = 1 and h = 1.

    Backpropagation never has ``log p + H``. It adds ``-h p log p`` (two products) and ``-h p`` (one), and takes from
    that p times the sum over the vocabulary, which is ``g - h (1 - H)`` with terms of the absolute sum ``1 + H``. So
    terms cancel, and their own sizes count.

    Args:
        p: probabilities ``[K, V]``; `log_p` their logarithms, `entropy` ``[K, 1]`` in nats.
        terms: V, ``[K, 1]``.

    Returns:
        Bounds ``[K, V]`` for the part of g and that of h.
    """
    tree = terms.log2()
    of_g = u * p * (2 + tree)
    of_h = u * p * (3 * torch.where(p > 0, log_p.abs(), 0.0) + 2 + (4 + tree) * (1 + entropy))
    return of_g, of_h


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
    of_sums = min(u, torch.finfo(torch.float32).eps / 2)
    variance = of_sums**2 * terms * (pulled.square() / 3 + squares / 6) + u**2 * squares
    return CERTAIN * (variance / 3).sqrt()
