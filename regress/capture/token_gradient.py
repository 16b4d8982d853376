"""The loss of any trainer, token by token, read from the gradient of the last hidden states.

A loss that depends on the policy through the log-prob of the next token and the entropy of its distribution only
gives, at each position, with z = head(x) / temperature, p = softmax(z), target t and J the Jacobian of the head,

    d loss / d x = g J^T (e_t - p) / temperature + h J^T (-p (log p + H)) / temperature + rest

with g = d loss / d log p(t) and h = d loss / d H. These are two unknowns and as many equations as the states have
elements: least squares gives both, and the rest that neither explains. Everything is computed in float64.
"""

# ruff: noqa: N815  (the suffix of a field is its shape)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.capture.hidden_state_gradients import Head, Linearized, Reduce, blocks, errors_of
from regress.capture.temperature_search import find_temperature, search_temperature

__all__ = ["Head", "Reduce", "TokenGradient", "find_temperature", "residual_of", "solve"]

ROUNDING = 32
"""Largest residual, in units in the last place, that is taken for rounding; healthy trainers have 2. More is a finding
about the loss, and no error of the derivatives."""

LARGEST_ERROR = 0.1
"""Estimated relative error of d loss / d log-prob from rounding at which it counts as not recoverable."""


@dataclass(frozen=True)
class TokenGradient:
    """Derivatives of a loss by the log-prob and the entropy of each token, ``[K]`` in float64.

    Attributes:
        log_prob_K: d loss / d log-prob of the target; 0 where the states have no gradient, NaN where theirs is not
            finite.
        entropy_K: d loss / d entropy, likewise; 0 where the entropy of the token is stationary.
        residual_K: norm of what neither explains over the norm of the gradient; 0 where that is 0.
        recoverable_K: False where rounding hides `log_prob_K`: the target's probability is next to 1, the two
            directions are parallel (a vocabulary of two), or the gradient is not finite.
        temperature: given or found; None where none could be found, and then everything is as of temperature 1.
        log_probs_K, entropies_K: of the targets' distributions at that temperature, in nats.
        log_prob_error_K, entropy_error_K: bounds of the errors of the two derivatives: from the rest, as far as it is
            rounding, the rounding of the gradient's dtype, and that of logits and probabilities; infinite where one
            cannot be determined, or rounding may hide all of it.
        temperature_error: bound of the error of a temperature that was found, from the rest; None if it was given.
    """

    log_prob_K: Tensor
    entropy_K: Tensor
    residual_K: Tensor
    recoverable_K: Tensor
    temperature: float | None
    log_probs_K: Tensor
    entropies_K: Tensor
    log_prob_error_K: Tensor
    entropy_error_K: Tensor
    temperature_error: float | None = None


def solve(
    hidden_KH: Tensor,
    grad_KH: Tensor,
    head: Head,
    targets_K: Tensor,
    *,
    temperature: float | None = None,
    chunk: int = 1024,
    reduce: Reduce | None = None,
    vocabulary_start: int = 0,
    computed: torch.dtype | None = None,
) -> TokenGradient:
    """Solve for the token gradient of each position by least squares in two variables.

    Args:
        hidden_KH: last hidden states, each of the position that predicts its target.
        grad_KH: d loss / d hidden; its dtype says how it was rounded.
        head: the real output head, differentiable, for float64 states ``[K, H]`` (`LinearHead` wraps weights of any
            dtype); its logits before the temperature. Of a tensor-parallel head, the part of this rank.
        targets_K: token ids that the positions predict.
        temperature: divisor of the trainer's logits; None finds it.
        chunk: positions at once, at most; fewer where the vocabulary is large.
        reduce: for tensor-parallel heads, ``reduce(tensor, "sum" or "max")`` over the ranks of one head.
        vocabulary_start: first token id of this rank's part of the head.
        computed: coarsest dtype that the trainer computes logits and gradient in; by default that of the gradient.

    Raises:
        ValueError: shapes that do not match, or a temperature that cannot divide.

    Source: the chain rule through softmax(head(x) / temperature); see the module.
    """
    _check(hidden_KH, grad_KH, targets_K, temperature)
    error: float | None = None
    if temperature is None:
        found = search_temperature(
            hidden_KH, grad_KH, head, targets_K, reduce=reduce, vocabulary_start=vocabulary_start
        )
        temperature, error = (None, None) if found is None else (found.value, found.error)
    dtype = grad_KH.dtype if computed is None else computed
    parts = [
        _solve(
            Linearized(hidden_KH[rows], head, targets_K[rows], reduce, vocabulary_start),
            grad_KH[rows],
            temperature or 1.0,
            dtype,
        )
        for rows in blocks(hidden_KH, head, chunk, reduce)
    ]
    if not parts:
        parts = [dict.fromkeys(_FIELDS, hidden_KH.new_zeros(0, dtype=torch.float64))]
        parts[0]["recoverable_K"] = torch.zeros(0, dtype=torch.bool, device=hidden_KH.device)
    joined = {name: torch.cat([part[name] for part in parts]) for name in _FIELDS}
    return TokenGradient(temperature=temperature, temperature_error=error, **joined)


def residual_of(
    hidden_KH: Tensor,
    grad_KH: Tensor,
    head: Head,
    candidates: Mapping[str, Tensor],
    *,
    temperature: float | None = None,
    chunk: int = 1024,
    reduce: Reduce | None = None,
    vocabulary_start: int = 0,
) -> dict[str, float]:
    """Return the relative norm, over all positions, that other targets would leave unexplained.

    Where the residual of the next token is large and the one of another token vanishes, the trainer's loss takes the
    log-prob of that other token: a wrong shift of the targets.

    Args:
        candidates: name -> token ids ``[K]``, such as ``{"0": targets, "-1": the inputs themselves}``; an id below 0
            says that a position has no such token, and the position is left out.
        temperature: as in `solve`; None finds the best for each candidate, or takes 1.

    Returns:
        The residual of every candidate with a live position that has a token.
    """
    found: dict[str, float] = {}
    for name, targets_K in candidates.items():
        usable = (targets_K >= 0) & (grad_KH != 0).any(-1) & grad_KH.isfinite().all(-1)
        if not bool(usable.any()):
            continue
        grad = grad_KH[usable]
        solved = solve(
            hidden_KH[usable],
            grad,
            head,
            targets_K[usable],
            temperature=temperature,
            chunk=chunk,
            reduce=reduce,
            vocabulary_start=vocabulary_start,
        )
        square = grad.double().square().sum(-1)
        found[name] = float(((solved.residual_K.square() * square).sum() / square.sum()).sqrt())
    return found


_FIELDS = (
    "log_prob_K",
    "entropy_K",
    "residual_K",
    "recoverable_K",
    "log_probs_K",
    "entropies_K",
    "log_prob_error_K",
    "entropy_error_K",
)


def _solve(lines: Linearized, grad: Tensor, temperature: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the two unknowns of each position, their rests and the bounds of their errors."""
    at, eps, coarse = lines.at(temperature), torch.finfo(grad.dtype).eps, torch.finfo(dtype).eps
    # norms of about 1, whatever the scale of the loss: squares of float64 reach from 1e-308 to 1e308 only
    size = grad.double().abs().amax(-1, keepdim=True).nan_to_num(nan=1.0, posinf=1.0)
    unit = torch.where(size > 0, size, torch.ones_like(size))
    d = grad.double() / unit
    fit = at.fit(d)
    norm = d.norm(dim=-1)
    rest = fit.rest.norm(dim=-1)
    noise = torch.maximum(torch.minimum(rest, ROUNDING * coarse * norm), eps * norm)
    safe = torch.where(norm > 0, norm, torch.ones_like(norm))
    finite = d.isfinite().all(-1)
    lost = eps / at.not_target + eps / fit.sine
    scale = unit.squeeze(-1)
    of_rest = (
        torch.where(at.norm_a > 0, noise / (at.norm_a * fit.sine), torch.inf),
        torch.where(fit.has_entropy, noise / (at.norm_b * fit.sine), torch.inf),
    )
    shares = lines.rounding(fit, at, temperature, dtype)
    errors = errors_of(torch.stack((fit.g, fit.h), -1), shares, torch.stack(of_rest, -1))
    error, error_entropy = errors.unbind(-1)
    nan = torch.full_like(norm, torch.nan)
    return {
        "log_prob_K": torch.where(finite, fit.g * scale, nan),
        "entropy_K": torch.where(finite, fit.h * scale, nan),
        "residual_K": torch.where(finite, rest / safe, nan),
        "recoverable_K": finite & (lost < LARGEST_ERROR) & (at.norm_a > 0),
        "log_probs_K": at.log_probs,
        "entropies_K": at.entropies,
        "log_prob_error_K": torch.where(finite, error * scale, torch.inf),
        "entropy_error_K": torch.where(finite, error_entropy * scale, torch.inf),
    }


def _check(hidden_KH: Tensor, grad_KH: Tensor, targets_K: Tensor, temperature: float | None) -> None:
    if hidden_KH.dim() != 2 or hidden_KH.shape != grad_KH.shape or targets_K.shape != hidden_KH.shape[:1]:
        raise ValueError(
            f"states {tuple(hidden_KH.shape)}, their gradient {tuple(grad_KH.shape)} and targets "
            f"{tuple(targets_K.shape)} do not fit: give [K, H], [K, H] and [K]"
        )
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature={temperature} cannot divide logits: it must be greater than 0")
