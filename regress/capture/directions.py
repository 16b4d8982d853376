"""Gradients of log-prob and entropy by the hidden state, through the vector-Jacobian product of the real head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
"""States ``[K, H]`` to logits ``[K, V]``, differentiable."""

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Sum or maximum of a tensor over the ranks that hold the parts of one vocabulary."""

ELEMENTS = 1 << 24
"""Logits held at once, at most; about five tensors of this size live at a time (128 MiB each)."""

PARALLEL = 1e-10
"""Sine between the two directions (or size of the second, relative) below which float64 cannot tell them apart."""


@dataclass(frozen=True)
class Fit:
    """Least squares of a gradient in the two directions.

    ``rest`` is ``[K, H]``, the others ``[K]``; ``sine`` is that of the angle between the directions, 0 if they are
    parallel, and 1 where there is only one.
    """

    g: Tensor
    h: Tensor
    rest: Tensor
    sine: Tensor
    has_entropy: Tensor


@dataclass(frozen=True)
class Directions:
    """Log-prob and entropy of each position, and their gradients by its state; all float64.

    Attributes:
        a, b: ``[K, H]`` d log-prob / d state and d entropy / d state.
        norm_a, norm_b: their norms.
        not_target: ``[K]`` 1 - p(target), summed from the other probabilities.
    """

    a: Tensor
    b: Tensor
    norm_a: Tensor
    norm_b: Tensor
    not_target: Tensor
    log_probs: Tensor
    entropies: Tensor

    def fit(self, d: Tensor) -> Fit:
        """Solve ``d = g a + h b + rest`` for each position: the part along b that a has not, then the part along a."""
        norm_a, norm_b = (torch.where(n > 0, n, torch.ones_like(n)) for n in (self.norm_a, self.norm_b))
        a, b = self.a / norm_a[:, None], self.b / norm_b[:, None]
        across = b - (a * b).sum(-1, keepdim=True) * a
        across -= (a * across).sum(-1, keepdim=True) * a  # twice is enough
        sine = across.norm(dim=-1)
        stationary = self.norm_b <= PARALLEL * self.norm_a  # a flat distribution: its entropy moves nowhere
        usable = ~stationary & (sine > PARALLEL)
        unit = across / torch.where(usable, sine, torch.ones_like(sine))[:, None]
        along = torch.where(usable, (d * unit).sum(-1), torch.zeros_like(sine))
        h = torch.where(
            usable, along / torch.where(usable, sine, torch.ones_like(sine)), torch.zeros_like(sine)
        )
        g = (d * a).sum(-1) - h * (a * b).sum(-1)
        rest = d - g[:, None] * a - h[:, None] * b
        sine = torch.where(
            stationary, torch.ones_like(sine), torch.where(usable, sine, torch.zeros_like(sine))
        )
        has_a = self.norm_a > 0
        return Fit(torch.where(has_a, g / norm_a, torch.zeros_like(g)), h / norm_b, rest, sine, usable)


def blocks(hidden: Tensor, head: Head, chunk: int, reduce: Reduce | None) -> Iterator[slice]:
    """Yield rows ``0:K`` in pieces whose logits stay within `ELEMENTS`; the same on all ranks of one head."""
    if hidden.shape[0] == 0:
        return
    with torch.no_grad():
        width = torch.tensor(head(hidden[:1].double()).shape[-1], device=hidden.device)
    vocabulary = int(width if reduce is None else reduce(width, "max"))
    step = max(1, min(chunk, ELEMENTS // max(vocabulary, 1)))
    for start in range(0, hidden.shape[0], step):
        yield slice(start, min(start + step, hidden.shape[0]))


def directions(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    reduce: Reduce | None = None,
    vocabulary_start: int = 0,
) -> Directions:
    """Return the directions of the positions of one block; see `regress.capture.token_gradient.solve` for the
    arguments."""
    return Linearized(hidden, head, targets, reduce, vocabulary_start).at(temperature)


class Linearized:
    """The head at the states of one block: logits once, directions at any temperature."""

    def __init__(
        self, hidden: Tensor, head: Head, targets: Tensor, reduce: Reduce | None, vocabulary_start: int
    ) -> None:
        self._reduce = reduce
        with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
            self._states = hidden.detach().double().requires_grad_()
            self._logits = head(self._states)
        column = targets.to(hidden.device).long()[:, None] - vocabulary_start
        self._inside = (column >= 0) & (column < self._logits.shape[-1])
        self._column = column.clamp(0, self._logits.shape[-1] - 1)
        if reduce is None and not bool(self._inside.all()):
            raise ValueError(
                f"targets span {int(targets.min())} to {int(targets.max())}, outside the vocabulary of "
                f"{self._logits.shape[-1]}: leave positions without a target out"
            )

    def at(self, temperature: float) -> Directions:
        """Return the directions with logits divided by `temperature`."""
        with torch.no_grad():
            z = self._logits.detach().double() / temperature
            top = self._over_ranks(z.amax(-1, keepdim=True), "max")
            log_sum = self._sum(torch.exp(z - top)).log()
            log_p = (z - top).sub_(log_sum)
            p = log_p.exp()
            own = torch.where(self._inside, p.gather(1, self._column), 0.0)
            held = torch.where(self._inside, log_p.gather(1, self._column), 0.0)
            others = p.scatter_add(
                1, self._column, -own
            )  # exactly 0 at the target: 1 - p(target) without cancellation
            rest = self._sum(others)
            log_prob = self._over_ranks(held, "sum")
            log_prob = torch.where(rest < 0.5, torch.log1p(-rest.clamp(max=0.5)), log_prob)
            plogp = torch.where(p > 0, p * log_p, 0.0)
            entropy = -self._sum(plogp)
            toward = others.neg_()
            toward.scatter_add_(1, self._column, torch.where(self._inside, rest, 0.0))
            turn = plogp.add_(p * entropy).neg_()
        a, b = self._pull_back(toward, True), self._pull_back(turn, True)
        a, b = a / temperature, b / temperature
        return Directions(
            a, b, a.norm(dim=-1), b.norm(dim=-1), rest.squeeze(-1), log_prob.squeeze(-1), entropy.squeeze(-1)
        )

    def _pull_back(self, cotangent: Tensor, keep: bool) -> Tensor:
        (grad,) = torch.autograd.grad(
            self._logits, self._states, cotangent.to(self._logits.dtype), retain_graph=keep
        )
        return self._over_ranks(grad.detach(), "sum")

    def _sum(self, values: Tensor) -> Tensor:
        return self._over_ranks(values.sum(-1, keepdim=True), "sum")

    def _over_ranks(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return values if self._reduce is None else self._reduce(values, how)
