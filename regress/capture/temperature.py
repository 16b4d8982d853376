"""The temperature of a trainer, found where the gradient of its hidden states leaves the least unexplained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.capture.directions import Head, Linearized, Reduce

LOWEST, HIGHEST, POINTS = 0.05, 20.0, 49
TOKENS = 32
"""Positions that take part in the search: those with the largest gradients."""
LARGEST_ERROR = 0.1
"""Relative error of a minimum from which on it counts as none: the residual does not say which temperature it was."""
PROMINENCE = 3.0
"""Times by which every other valley of the residual must lie above the lowest."""
CONVERGED = 1e-8
ITERATIONS = 25


@dataclass(frozen=True)
class Temperature:
    """A temperature with the bound of its error, and the relative norm that stays unexplained there."""

    value: float
    error: float
    residual: float


def find_temperature(
    hidden_KH: Tensor,
    grad_KH: Tensor,
    head: Head,
    targets_K: Tensor,
    *,
    reduce: Reduce | None = None,
    vocabulary_start: int = 0,
) -> float | None:
    """Return what the trainer divides its logits by, or None where the residual has no sharp minimum.

    Arguments are those of `regress.capture.token_gradient.solve`. None for no position with a gradient, for
    distributions that a temperature does not change, and for losses of which the two directions explain too little.
    """
    found = search_temperature(
        hidden_KH, grad_KH, head, targets_K, reduce=reduce, vocabulary_start=vocabulary_start
    )
    return None if found is None else found.value


def search_temperature(
    hidden_KH: Tensor,
    grad_KH: Tensor,
    head: Head,
    targets_K: Tensor,
    *,
    reduce: Reduce | None = None,
    vocabulary_start: int = 0,
) -> Temperature | None:
    """Return the temperature like `find_temperature`, with the bound of its error.

    A coarse grid of logarithms finds the valleys; Gauss-Newton steps on the rest, as a function of the logarithm, find
    the bottom of the lowest. The bound is the rest there over the rate at which a wrong temperature adds to it.
    """
    chosen = _chosen(grad_KH)
    if chosen.numel() == 0:
        return None
    lines = Linearized(hidden_KH[chosen], head, targets_K[chosen], reduce, vocabulary_start)
    d = grad_KH[chosen].double()
    d = d / d.abs().amax(-1, keepdim=True)
    d = d / d.norm(dim=-1, keepdim=True)

    def rest(log_t: float) -> Tensor:
        return lines.at(math.exp(log_t)).fit(d).rest

    grid = torch.linspace(math.log(LOWEST), math.log(HIGHEST), POINTS).tolist()
    heights = [float(rest(point).norm()) for point in grid]
    best = min(range(POINTS), key=heights.__getitem__)
    if best in (0, POINTS - 1):
        return None
    log_t, bottom, slope = _descend(rest, grid[best], (grid[best - 1], grid[best + 1]))
    valleys = [
        heights[i]
        for i in range(1, POINTS - 1)
        if abs(i - best) > 1 and heights[i] <= min(heights[i - 1], heights[i + 1])
    ]
    rounding = torch.finfo(grad_KH.dtype).eps * math.sqrt(chosen.numel())
    error = max(bottom, rounding) / slope if slope > 0 else math.inf
    if error > LARGEST_ERROR or min(valleys, default=math.inf) < PROMINENCE * bottom:
        return None
    value = math.exp(log_t)
    return Temperature(value, error * value, bottom / math.sqrt(chosen.numel()))


def _chosen(grad: Tensor) -> Tensor:
    """Indices of the positions with the largest finite gradients, none of them 0."""
    size = grad.double().norm(dim=-1)
    live = torch.nonzero(size.isfinite() & (size > 0))[:, 0]
    order = torch.argsort(size[live], descending=True, stable=True)
    return live[order[:TOKENS]]


def _descend(
    rest: Callable[[float], Tensor], start: float, bracket: tuple[float, float]
) -> tuple[float, float, float]:
    """Bottom of the valley: its place, the norm of the rest there, and the norm of its derivative."""
    log_t, step, slope = start, math.inf, 0.0
    width = bracket[1] - bracket[0]
    here = rest(log_t)
    for _ in range(ITERATIONS):
        delta = max(min(abs(step), width) * 1e-2, 1e-6)
        change = (rest(log_t + delta) - here) / delta
        slope = float(change.norm())
        if slope == 0.0:
            break
        step = -float((change * here).sum()) / slope**2
        log_t = min(max(log_t + step, bracket[0]), bracket[1])
        here = rest(log_t)
        if abs(step) < CONVERGED:
            break
    return log_t, float(here.norm()), slope
