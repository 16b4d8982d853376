"""KL divergence from the reference model, estimated on sampled tokens.

Source of the estimators: J. Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError, check_same_length
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_catalogue import KL_ESTIMATORS
from regress.grpo.objective_checks import check_choice


def kl_estimate(log_probs_K: Tensor, ref_log_probs_K: Tensor, objective: ObjectiveFields) -> Tensor:
    """Estimate KL(policy, reference) per token, shape [K], differentiable in ``log_probs_K``.

    With x = log p - log p_ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1, abs = |x|; with "+" the value of the
    estimator and the gradient of k2, whose expectation is that of the divergence. The clamps of k3 and "+" are verl's.
    """
    check_choice("kl_estimator", objective.kl_estimator, KL_ESTIMATORS)
    kind, through, _ = objective.kl_estimator.partition("+")
    if kind == "k2" or through:
        square = 0.5 * (log_probs_K - ref_log_probs_K).square()
        if kind == "k2":
            return square
    if kind == "k3":
        gap = _clamp(ref_log_probs_K - log_probs_K, objective.kl_log_ratio_clamp)
        found = _clamp(torch.exp(gap) - gap - 1, objective.kl_clamp)
    else:
        found = log_probs_K - ref_log_probs_K
        found = found.abs() if kind == "abs" else found
    return square - square.detach() + found.detach() if through else found


def kl_penalty(log_probs_K: Tensor, ref_log_probs_K: Tensor | None, objective: ObjectiveFields) -> Tensor:
    """Return ``kl_coef`` times the estimate, without gradient, to subtract from each token's reward; shape [K]."""
    if ref_log_probs_K is None:
        raise InputError("""ref_log_probs_K is missing: a KL in the reward needs log-probs of a reference model; provide
        them or set kl_coef=0.""")
    check_same_length(log_probs_K=log_probs_K, ref_log_probs_K=ref_log_probs_K)
    return objective.kl_coef * kl_estimate(log_probs_K.detach(), ref_log_probs_K.detach(), objective)


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
