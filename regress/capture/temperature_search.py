"""The temperature of a trainer, found where the gradient of its hidden states leaves the least unexplained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.capture.hidden_state_gradients import Head, Linearized, Reduce

LOWEST, HIGHEST, POINTS = 0.05, 20.0, 49
TOKENS = 32
"""Most positions that take part in the search: those with the largest gradients."""
LARGEST_ERROR = 0.03
"""Relative error from which a temperature counts as not found."""
WINDOW = 0.3
"""Largest half width of a valley, in logarithms; a wider one does not determine the temperature."""
PROMINENCE = 3.0
"""Factor by which every other valley of the residual must lie above the lowest."""
NARROWINGS = 24
REFINEMENTS = 6
CONSISTENT = 4.0
"""Largest distance of the derivatives by the entropy from a pattern that explains them, in multiples of their noise."""


@dataclass(frozen=True)
class Temperature:
    """A temperature with the bound of its error, and the relative norm left unexplained there."""

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

    Arguments are those of `regress.capture.token_gradient.solve`. None is returned for no position with a gradient, for
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

    A coarse grid of logarithms finds the valleys of the rest, and sections the bottom of the lowest. There the
    rest grows with the square of the error only: to first order a temperature that is too high by a factor 1 + x
    moves the gradient along the entropy, by x times d loss / d log-prob. So if the derivatives by the entropy are
    that multiple of those by the log-prob (no bonus), or that and a constant (a bonus, averaged over tokens), x
    follows to rounding.
    """
    chosen = _chosen(grad_KH)
    if chosen.numel() == 0:
        return None
    lines = Linearized(hidden_KH[chosen], head, targets_K[chosen], reduce, vocabulary_start)
    d = grad_KH[chosen].double()
    d = d / d.abs().max()
    eps = torch.finfo(grad_KH.dtype).eps
    valley = _valley(lines, d, eps)
    if valley is None:
        return None
    log_t, window = valley
    value, error = math.exp(log_t), window
    refined = _refine(lines, d, eps, value, window)
    if refined is not None:
        value, error = refined
    if error > LARGEST_ERROR:
        return None
    return Temperature(value, error * value, _height(lines, d, math.log(value)) / math.sqrt(len(d)))


def _height(lines: Linearized, d: Tensor, log_t: float) -> float:
    """Return the norm over all positions of the relative rest."""
    return float((lines.at(math.exp(log_t)).fit(d).rest / d.norm(dim=-1, keepdim=True)).norm())


def _valley(lines: Linearized, d: Tensor, eps: float) -> tuple[float, float] | None:
    """Return the bottom of the lowest valley, as a logarithm, and the half width that lies within noise."""
    grid = torch.linspace(math.log(LOWEST), math.log(HIGHEST), POINTS).tolist()
    heights = [_height(lines, d, point) for point in grid]
    best = min(range(POINTS), key=heights.__getitem__)
    if best in (0, POINTS - 1):
        return None
    low, high = grid[best - 1], grid[best + 1]
    for _ in range(NARROWINGS):
        left, right = low + (high - low) * 0.382, low + (high - low) * 0.618
        if _height(lines, d, left) < _height(lines, d, right):
            high = right
        else:
            low = left
    log_t = (low + high) / 2
    bottom = max(_height(lines, d, log_t), eps * math.sqrt(len(d)))
    step = grid[1] - grid[0]
    rise = max(min(heights[best - 1], heights[best + 1]), 1e-300) / step**2
    window = math.sqrt(bottom / rise)
    others = [
        heights[i]
        for i in range(1, POINTS - 1)
        if abs(i - best) > 1 and heights[i] <= min(heights[i - 1], heights[i + 1])
    ]
    if window > WINDOW or min(others, default=math.inf) < PROMINENCE * bottom:
        return None
    return log_t, window


def _refine(
    lines: Linearized, d: Tensor, eps: float, value: float, window: float
) -> tuple[float, float] | None:
    """Return temperature and relative error at which entropy derivatives follow a pattern; None without one."""
    start = value
    for with_bonus in (False, True):
        value, error, holds = start, math.inf, False
        for _ in range(REFINEMENTS):
            step = _excess(lines, d, eps, value, with_bonus)
            if step is None or abs(step[0]) > 0.5:
                holds = False
                break
            value, error, holds = value / (1 + step[0]), step[1], step[2]
            if abs(step[0]) < 1e-10:
                break
        holds = holds and abs(math.log(value / start)) <= 3 * window
        if holds and error <= window:
            return value, error
    return None


def _excess(
    lines: Linearized, d: Tensor, eps: float, value: float, with_bonus: bool
) -> tuple[float, float, bool] | None:
    """Return a temperature's relative excess, its error, and True if a pattern explains entropy derivatives."""
    at = lines.at(value)
    fit = at.fit(d)
    usable = fit.has_entropy & (fit.sine > 1e-3)
    if int(usable.sum()) < 3:
        return None
    noise = torch.maximum(fit.rest.norm(dim=-1), eps * d.norm(dim=-1)) / (at.norm_b * fit.sine)
    g, h, weight = fit.g[usable], fit.h[usable], 1 / noise[usable]
    columns = [g * weight, weight] if with_bonus else [g * weight]
    system = torch.stack(columns, 1)
    scale = system.norm(dim=0)
    gram = (system / scale).T @ (system / scale)
    if float(torch.linalg.det(gram)) < 1e-6:
        return None
    inverse = torch.linalg.inv(gram)
    solution = (inverse @ ((system / scale).T @ (h * weight))) / scale
    left = h * weight - system @ solution
    error = float(inverse[0, 0].sqrt() / scale[0])
    return float(solution[0]), error, float(left.square().mean().sqrt()) <= CONSISTENT


def _chosen(grad: Tensor) -> Tensor:
    """Return the indices of the positions with the largest finite gradients, none of them 0."""
    size = grad.double().norm(dim=-1)
    live = torch.nonzero(size.isfinite() & (size > 0))[:, 0]
    order = torch.argsort(size[live], descending=True, stable=True)
    return live[order[:TOKENS]]
