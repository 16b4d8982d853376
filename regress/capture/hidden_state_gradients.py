"""Gradients of log-prob and entropy by the hidden state, through the vector-Jacobian product of the real head.

u is half of the spacing of a dtype throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
"""Differentiable function from states ``[K, H]`` to logits ``[K, V]``."""

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Function that reduces a tensor by sum or maximum over the ranks that hold the parts of one vocabulary."""

ELEMENTS = 1 << 24
"""Most logits held at once; about five tensors of this size live at a time (128 MiB each)."""

PROBES = 4
"""Random sign vectors that measure a head that is no `LinearHead`."""

PARALLEL = 1e-10
"""Sine between the two directions (or size of the second, relative) below which float64 cannot tell them apart."""


@dataclass(frozen=True)
class Fit:
    """Least squares of a gradient in the two directions.

    ``rest`` is ``[K, H]``, the others ``[K]``; ``sine`` is that of the angle between the directions, 0 if they are
    parallel, and 1 where there is only one. ``readers`` are the two vectors ``[K, H]`` whose products with a gradient
    are g and h: 0 where a derivative cannot be determined.
    """

    g: Tensor
    h: Tensor
    rest: Tensor
    sine: Tensor
    has_entropy: Tensor
    readers: tuple[Tensor, Tensor]


def errors_of(found: Tensor, shares: Tensor, noise: Tensor) -> Tensor:
    """Bound the errors of two derivatives ``[K, 2]`` that are wrong by shares of the true ones; infinite for no bound.

    The shares are those of the true derivatives t, and only the found f are known: a gradient that rounding made small
    gives a small f. ``|f - t| <= B |t| + n`` bounds t by ``|t| <= (1 - B)^-1 (|f| + n)``, where the powers of B fall,
    and the error by ``B |t| + n``; where they do not, all of a derivative may be lost.

    Args:
        shares: B, ``[K, 2, 2]``, from `Linearized.rounding`.
        noise: n, ``[K, 2]``: errors that no derivative scales; infinite for a derivative that is not determined.
    """
    known = noise.isfinite()
    some = torch.where(known, noise, 0.0)
    left = 1 - shares.diagonal(dim1=-2, dim2=-1)
    across = torch.stack((shares[:, 0, 1], shares[:, 1, 0]), -1)
    determinant = left.prod(-1) - across.prod(-1)
    bounded = (left > 0).all(-1) & (determinant > 0)
    from_found = found.abs() + some
    true = (left.flip(-1) * from_found + across * from_found.flip(-1)) / determinant[:, None]
    errors = some + (shares * true[:, None, :]).sum(-1)
    return torch.where(known & bounded[:, None], errors, torch.inf)


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
        of_h = torch.where(
            usable, 1 / torch.where(usable, sine, torch.ones_like(sine)), torch.zeros_like(sine)
        )
        read_h = unit * of_h[:, None]
        read_g = (a - (a * b).sum(-1, keepdim=True) * read_h) * (has_a / norm_a)[:, None]
        readers = (read_g, read_h / norm_b[:, None])
        return Fit(
            torch.where(has_a, g / norm_a, torch.zeros_like(g)), h / norm_b, rest, sine, usable, readers
        )


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


class Linearized:
    """The head at the states of one block: logits once, directions at any temperature."""

    def __init__(
        self, hidden: Tensor, head: Head, targets: Tensor, reduce: Reduce | None, vocabulary_start: int
    ) -> None:
        self._reduce = reduce
        self._head = head
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
            inside = torch.where(self._inside, log_p.gather(1, self._column), 0.0)
            others = p.scatter_add(
                1, self._column, -own
            )  # exactly 0 at the target: 1 - p(target) without cancellation
            rest = self._sum(others)
            log_prob = self._over_ranks(inside, "sum")
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

    def rounding(self, fit: Fit, at: Directions, temperature: float, dtype: torch.dtype) -> Tensor:
        """Bound what a trainer's rounding does to its two derivatives before its gradient is rounded, ``[K, 2, 2]``.

        Row: the derivative that is wrong, g or h; column: the true one that it is wrong by a share of.

        An error of probabilities is one of the gradient, and where few tokens have nearly all of the probability it
        lies along the two directions: no rest shows it. Errors w_v of the gradient by the logits reach the derivative
        with the reader r by at most ``sum_v |J r|_v w_v / temperature``; independent ones by `CERTAIN` standard
        deviations of their sum.

        Args:
            dtype: the one that the trainer computes logits and probabilities in.

        Source: first-order errors, u half of the spacing of the dtype. Of ``p = exp(log_softmax(z / temperature))``,
        e_v relative: the logits' own error, measured as the largest distance of logits computed in that dtype from
        those of float64; u times the sizes of logit (twice: the temperature is rounded, too), distance from the largest
        logit and log-prob; and u log2(V) for the sum of exponentials in a tree. The gradient by the logits is wrong by
        ``|g| e_v p_v + |h| p_v (e_v (|log p_v + H| + 1) + error of H)`` because of that, by the roundings of its own
        terms (see `own_rounding`) and of its elements (`EACH`, `SHARED`), and by that of the head's derivative where it
        has a ``slope_error``. Its product with the head is rounded as `product_noise` says.
        """
        u = torch.finfo(dtype).eps / 2
        with torch.no_grad():
            exact = self._logits.detach().double()
            z = exact / temperature
            top = self._over_ranks(z.amax(-1, keepdim=True), "max")
            log_p = (z - top).sub_(self._sum(torch.exp(z - top)).log())
            p = log_p.exp()
            terms = self._sum(torch.full_like(z[:, :1], z.shape[-1]))
            rounded = self._rounded(dtype)
            error = self._over_ranks((rounded - exact).abs().amax(-1, keepdim=True), "max") / temperature
            error = error + u * (2 * z.abs() + 2 * (z - top).abs() + log_p.abs() + terms.log2())
            entropy = -self._sum(torch.where(p > 0, p * log_p, 0.0))
            turn = (log_p + entropy).abs()
            of_entropy = self._sum(p * error * (log_p.abs() + 1))
            target = torch.zeros_like(p).scatter_(1, self._column, self._inside.double())
            toward, turning = (target - p).abs(), p * turn
            of_g, of_h = error * p, (error * (turn + 1) + of_entropy) * p
            common, alone = own_rounding(p, log_p, entropy, terms, dtype)
            of_g.add_(common[0])
            of_h.add_(common[1])
            each = [
                own.square() + EACH * (u * size).square()
                for own, size in zip(alone, (toward, turning), strict=True)
            ]
            slope_error = getattr(self._head, "slope_error", None)
            slope = None if slope_error is None else slope_error(exact, rounded, u)
            if slope is not None:
                of_g.add_(toward * slope)
                of_h.add_(turning * slope)
        noises = [
            product_noise(temperature * pulled, self._squares(wrong), terms, dtype)
            for pulled, wrong in ((at.a, toward), (at.b, turning))
        ]
        rows = [self._read(reader, (of_g, of_h), each, noises, dtype) for reader in fit.readers]
        return torch.stack(rows, 1) / temperature + SHARED * u * torch.eye(2).to(exact)

    def _read(
        self,
        reader: Tensor,
        common: Sequence[Tensor],
        alone: Sequence[Tensor],
        noises: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return what one reader reads of errors of the gradient, ``[K, 2]``, for g and for h.

        Args:
            common: largest errors of the gradient by each logit, of one direction.
            alone: squares of those that are independent of each other.
            noises: errors of each element of the product with the head.
        """
        seen = self._pushed(reader, dtype).abs_()
        along = [self._sum(seen * wrong) for wrong in common]
        drawn = [CERTAIN * (self._sum(seen.square() * square) / 3).sqrt() for square in alone]
        across = [(reader * noise).norm(dim=-1, keepdim=True) for noise in noises]
        parts = zip(along, drawn, across, strict=True)
        return torch.cat([one + other + last for one, other, last in parts], -1)

    def _squares(self, cotangent: Tensor) -> Tensor:
        """Return ``sum_v (J_vj c_v)^2`` for each element of the states, ``[K, H]``.

        A head that has no ``pulled_squares`` is asked for it by random signs: the expected square of ``J^T (s c)``.
        """
        squares = getattr(self._head, "pulled_squares", None)
        if squares is not None:
            return self._over_ranks(squares(cotangent, self._logits.detach().double()), "sum")
        signs = torch.Generator().manual_seed(0)
        total = torch.zeros_like(self._states)
        for _ in range(PROBES):
            drawn = torch.randint(2, cotangent.shape, generator=signs).to(cotangent) * 2 - 1
            (found,) = torch.autograd.grad(
                self._logits, self._states, (cotangent * drawn).to(self._logits.dtype), retain_graph=True
            )
            total += found.detach().square() / PROBES
        return self._over_ranks(total, "sum")

    def _rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the logits as computed in a dtype; those that overflow it with an error of one unit."""
        exact = self._logits.detach().double()
        with torch.autocast(exact.device.type, enabled=False):
            found = self._head(self._states.detach().to(dtype)).double()
        return torch.where(found.isfinite(), found, exact * (1 + torch.finfo(dtype).eps))

    def _pushed(self, direction: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the derivative of the logits along a direction of the states, ``[K, V]``, by a difference.

        The step is the root of the spacing of the dtype, which a head that is no `LinearHead` is computed in.
        """
        states = self._states.detach()
        length = direction.norm(dim=-1, keepdim=True)
        size = states.norm(dim=-1, keepdim=True)
        moves = (length > 0) & (size > 0)
        part = torch.finfo(dtype).eps ** 0.5
        step = torch.where(moves, part * size / torch.where(moves, length, 1.0), 0.0)
        with torch.autocast(states.device.type, enabled=False):
            moved = self._head(states + step * direction).double() - self._logits.detach().double()
        return moved / torch.where(moves, step, 1.0)

    def _pull_back(self, cotangent: Tensor, keep: bool) -> Tensor:
        (grad,) = torch.autograd.grad(
            self._logits, self._states, cotangent.to(self._logits.dtype), retain_graph=keep
        )
        return self._over_ranks(grad.detach(), "sum")

    def _sum(self, values: Tensor) -> Tensor:
        return self._over_ranks(values.sum(-1, keepdim=True), "sum")

    def _over_ranks(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return values if self._reduce is None else self._reduce(values, how)


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
