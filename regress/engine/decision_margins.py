"""Margins of a rollout's decisions: how near each draw, argmax and cut came to another outcome.

Tokens can only be compared exactly between computations that round differently if no decision is within their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers import LogitsProcessor

_measured: ContextVar[list[float] | None] = ContextVar("regress_margins", default=None)


@contextmanager
def margins() -> Iterator[list[float]]:
    """Yield the list of margins of everything that is sampled inside: probabilities, and leads of scores for top-k."""
    found: list[float] = []
    token = _measured.set(found)
    try:
        yield found
    finally:
        _measured.reset(token)


def watched() -> bool:
    """Return True inside of `margins`."""
    return _measured.get() is not None


def note_draws(probs: Tensor, uniform: Tensor, chosen: Tensor) -> None:
    """Note how far each uniform number lies from the ends of the interval of its token.

    Args:
        probs: ``[B, V]`` float64; rows need not add up to 1.
        uniform: ``[B]`` in [0, 1).
        chosen: ``[B]`` drawn tokens.
    """
    found = _measured.get()
    if found is None:
        return
    upper = probs.cpu().cumsum(-1)
    total, at = upper[:, -1], chosen.cpu()[:, None]
    end = upper.gather(1, at).squeeze(1)
    start = end - probs.cpu().gather(1, at).squeeze(1)
    target = uniform * total
    inside = torch.where(start > 0, target - start, torch.inf)
    below = torch.where(end < total, end - target, torch.inf)
    found += (inside.minimum(below) / total).tolist()


class ArgmaxMargins(LogitsProcessor):
    """Notes by how much the most probable token leads; scores pass unchanged."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        top = scores.double().softmax(-1).topk(2, dim=-1).values
        _note((top[:, 0] - top[:, 1]).tolist())
        return scores


class TopKMargins(LogitsProcessor):
    """Notes by how much the last token that top-k keeps leads the first that it drops; scores pass unchanged.

    The lead is that of the scores, or of the logarithms of probabilities: unlikely tokens are all near to each other.
    """

    def __init__(self, top_k: int) -> None:
        self._k = top_k

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._k < scores.shape[-1]:
            top = scores.double().topk(self._k + 1, dim=-1).values
            _note((top[:, -2] - top[:, -1]).tolist())
        return scores


class TopPMargins(LogitsProcessor):
    """Notes how far the mass of the least probable tokens stays from that which top-p drops; scores pass unchanged."""

    def __init__(self, top_p: float) -> None:
        self._p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mass = scores.double().softmax(-1).sort(-1).values.cumsum(-1)
        _note((mass - (1 - self._p)).abs().amin(-1).tolist())
        return scores


def _note(values: list[float]) -> None:
    found = _measured.get()
    if found is not None:
        found += values
