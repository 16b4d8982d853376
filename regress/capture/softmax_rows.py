"""The loss of any trainer, token by token, read from the gradient of the logits that a softmax takes.

A loss that depends on a row of logits z through the log-prob of one token t and the entropy H of their distribution
gives, with p = softmax(z),

    d loss / d z = g (e_t - p) - h p (log p + H)

with g = d loss / d log p(t) and h = d loss / d H. At every j but t the gradient over p_j is a straight line in
log p_j + H with intercept -g and slope -h; t is the one entry beside it. Target and both unknowns follow from the row
alone: no head, no hidden state, no ids, no temperature. Everything is computed in float64.
"""

# ruff: noqa: N815  (the suffix of a field is its shape)

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from regress.capture.token_gradient import LARGEST_ERROR, ROUNDING

UNKNOWN = -1
"""Target of a row that nothing tells."""
ELEMENTS = 1 << 21
"""Most logits that are looked at together, in float64."""
_CANDIDATES = 3
"""Entries with the largest gradients, one of which is the target where it is unknown."""


@dataclass(frozen=True)
class SoftmaxRows:
    """Hold targets and derivatives read from rows of logits and their gradient, ``[R]`` each.

    Attributes:
        targets_R: given, or found in a row with a gradient; `UNKNOWN` elsewhere.
        live_R: rows with a gradient.
        log_probs_R: of the target, NaN where it is unknown; entropies_R: of the distribution, in nats.
        log_prob_R: d loss / d log-prob of the target; entropy_R: d loss / d entropy; 0 where the row has no gradient.
        residual_R: norm of what neither explains over the norm of the gradient.
        recoverable_R: False where rounding hides `log_prob_R`, or the gradient is not finite.
        log_prob_error_R, entropy_error_R: bounds of the errors of the two derivatives from rounding.
    """

    targets_R: Tensor
    live_R: Tensor
    log_probs_R: Tensor
    entropies_R: Tensor
    log_prob_R: Tensor
    entropy_R: Tensor
    residual_R: Tensor
    recoverable_R: Tensor
    log_prob_error_R: Tensor
    entropy_error_R: Tensor

    def completed(self, logits_RV: Tensor, following_R: Tensor | None) -> SoftmaxRows:
        """Return the rows with the tokens that follow as targets of those without a gradient, which tell none."""
        if following_R is None:
            return self
        open_R = (self.targets_R == UNKNOWN) & ~self.live_R & (following_R != UNKNOWN)
        rows = torch.nonzero(open_R)[:, 0]
        log_p = logits_RV[rows].double().log_softmax(-1).gather(-1, following_R[rows][:, None])[:, 0]
        return replace(
            self,
            targets_R=self.targets_R.index_copy(0, rows, following_R[rows]),
            log_probs_R=self.log_probs_R.index_copy(0, rows, log_p),
        )

    def plus(self, other: SoftmaxRows) -> SoftmaxRows:
        """Return the rows with what a further backward pass adds."""
        return replace(
            self,
            targets_R=torch.where(self.targets_R == UNKNOWN, other.targets_R, self.targets_R),
            live_R=self.live_R | other.live_R,
            log_probs_R=torch.where(self.log_probs_R.isnan(), other.log_probs_R, self.log_probs_R),
            log_prob_R=self.log_prob_R + other.log_prob_R,
            entropy_R=self.entropy_R + other.entropy_R,
            residual_R=torch.maximum(self.residual_R, other.residual_R),
            recoverable_R=self.recoverable_R & other.recoverable_R,
            log_prob_error_R=self.log_prob_error_R + other.log_prob_error_R,
            entropy_error_R=self.entropy_error_R + other.entropy_error_R,
        )

    @classmethod
    def joined(cls, parts: list[SoftmaxRows]) -> SoftmaxRows:
        """Return the rows of several, one after another."""
        return cls(*(torch.cat([getattr(part, spec.name) for part in parts]) for spec in fields(cls)))


def read_rows(logits_RV: Tensor, grad_RV: Tensor, targets_R: Tensor, computed: torch.dtype) -> SoftmaxRows:
    """Read token gradient, entropy gradient and target of each row.

    Args:
        targets_R: given targets, `UNKNOWN` where one is unknown.
        computed: coarsest dtype that the gradient was computed in.

    Source: the derivative of log-softmax and of its entropy; see the module.
    """
    size = max(1, ELEMENTS // max(logits_RV.shape[-1], 1))
    starts = range(0, max(len(logits_RV), 1), size)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        parts = [
            _read(logits_RV[a : a + size], grad_RV[a : a + size], targets_R[a : a + size], computed)
            for a in starts
        ]
        return SoftmaxRows.joined(parts)


def _read(logits: Tensor, grad: Tensor, targets: Tensor, computed: torch.dtype) -> SoftmaxRows:
    eps, coarse = torch.finfo(grad.dtype).eps, max(torch.finfo(computed).eps, torch.finfo(grad.dtype).eps)
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(-1)
    bent = -p * (log_p.nan_to_num(neginf=0.0) + entropy[:, None])  # d H / d z
    scale = grad.double().abs().amax(-1).nan_to_num(nan=1.0, posinf=1.0)
    live, finite = (grad != 0).any(-1), grad.isfinite().all(-1)
    unit = torch.where(scale > 0, scale, 1.0)
    d = torch.where(finite[:, None], grad.double() / unit[:, None], 0.0)
    best = _fit(d, p, bent, targets.clamp(min=0))
    found = targets.clone()
    unknown = live & finite & (targets == UNKNOWN)
    if bool(unknown.any()):
        best, found = _searched(d, p, bent, best, found, unknown, eps)
    g, h, rest, sine, of_target, of_entropy = best
    norm = d.norm(dim=-1)
    lost = eps / of_target.clamp(min=1e-300) + eps / sine
    noise = torch.maximum(torch.minimum(rest, ROUNDING * coarse * norm), eps * norm)
    known = found != UNKNOWN
    usable = known | (sine > 1e-300)
    at = log_p.gather(-1, found.clamp(min=0)[:, None])[:, 0]
    zero = torch.zeros_like(norm)
    solved = live & finite & usable
    return SoftmaxRows(
        found,
        live,
        torch.where(known, at, torch.nan),
        entropy,
        torch.where(solved, g * unit, zero).masked_fill(~finite, torch.nan),
        torch.where(solved, h * unit, zero).masked_fill(~finite, torch.nan),
        torch.where(live & finite & (norm > 0), rest / norm.clamp(min=1e-300), zero),
        finite & (~live | (lost < LARGEST_ERROR)),
        torch.where(solved, noise / (of_target * sine).clamp(min=1e-300) * unit, zero),
        torch.where(solved & (of_entropy > 0), noise / (of_entropy * sine).clamp(min=1e-300) * unit, zero),
    )


def _searched(
    d: Tensor, p: Tensor, bent: Tensor, known: list[Tensor], targets: Tensor, unknown: Tensor, eps: float
) -> tuple[list[Tensor], Tensor]:
    """Return the fits with the target that leaves least where none is known; none where another leaves as little."""
    line = _fit(d, p, bent, None)
    beside_the_line = d - line[0][:, None] * p - line[1][:, None] * bent
    count = min(_CANDIDATES, d.shape[-1])
    largest = torch.cat([d.abs().topk(count, -1).indices, beside_the_line.abs().topk(count, -1).indices], -1)
    fits = [_fit(d, p, bent, candidate) for candidate in largest.unbind(-1)]
    rests = torch.stack([fit[2] for fit in fits])
    first = rests.argmin(0)
    least = rests.gather(0, first[None])[0]
    chosen = largest.gather(-1, first[:, None])[:, 0]
    other = rests.masked_fill(chosen == largest.T, torch.inf).amin(0)
    clear = unknown & (other > 4 * torch.maximum(least, 2 * eps * d.norm(dim=-1)))
    best = [torch.stack(each).gather(0, first[None])[0] for each in zip(*fits, strict=True)]
    chosen = torch.where(clear, chosen, targets)
    unclear = _without_target(d, bent, least, eps)
    rows = zip(best, unclear, known, strict=True)
    return [torch.where(clear, new, torch.where(unknown, none, old)) for new, none, old in rows], chosen


def _without_target(d: Tensor, bent: Tensor, least: Tensor, eps: float) -> list[Tensor]:
    """Return what `_fit` does, of rows that several targets fit: their entropy if that explains them, else nothing."""
    bb = (bent * bent).sum(-1)
    h = (d * bent).sum(-1) / bb.clamp(min=1e-300)
    rest = (d - h[:, None] * bent).norm(dim=-1)
    alone = rest <= torch.maximum(2 * least, ROUNDING * eps * d.norm(dim=-1))
    one, none = torch.ones_like(h), torch.zeros_like(h)
    sine, size = torch.where(alone, 1.0, 1e-300), torch.where(alone, bb.sqrt(), 0.0)
    return [none, torch.where(alone, h, 0.0), torch.where(alone, rest, least), sine, one, size]


def _fit(d: Tensor, p: Tensor, bent: Tensor, targets: Tensor | None) -> list[Tensor]:
    """Return the two unknowns, the norm of the rest, the sine between the two directions, and their norms.

    Without targets the first direction is that of the probabilities alone.
    """
    along = p if targets is None else -p
    if targets is not None:
        along = along.scatter_add(-1, targets[:, None], torch.ones_like(p[:, :1]))
    aa, ab, bb = (along * along).sum(-1), (along * bent).sum(-1), (bent * bent).sum(-1)
    da, db = (d * along).sum(-1), (d * bent).sum(-1)
    flat = bb <= torch.finfo(p.dtype).eps ** 2 * aa  # the entropy of a uniform distribution is stationary
    determinant = (aa * bb - ab * ab).clamp(min=0)
    sine = torch.where(flat, 1.0, (determinant / (aa * bb).clamp(min=1e-300)).sqrt())
    parallel = ~flat & (sine < 1e-7)
    safe = torch.where(flat | parallel, 1.0, determinant)
    alone = da / aa.clamp(min=1e-300)
    g = torch.where(flat | parallel, alone, (da * bb - db * ab) / safe)
    h = torch.where(flat | parallel, 0.0, (db * aa - da * ab) / safe)
    rest = (d - g[:, None] * along - h[:, None] * bent).norm(dim=-1)
    return [g, h, rest, sine.clamp(min=1e-300), aa.sqrt(), torch.where(flat, 0.0, bb.sqrt())]
