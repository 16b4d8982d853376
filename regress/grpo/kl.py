"""KL divergence from the reference model, estimated on sampled tokens.

Source of the estimators: J. Schulman, "Approximating KL divergence".
"""

import torch
from torch import Tensor

from regress.grpo.checks import check_choice
from regress.grpo.inputs import InputError, check_same_length
from regress.grpo.objective import KL_ESTIMATORS, Objective


def kl_estimate(log_probs_K: Tensor, ref_log_probs_K: Tensor, objective: Objective) -> Tensor:
    """Estimate KL(policy, reference) per token, shape [K], differentiable in ``log_probs_K``.

    With x = log p - log p_ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1. The clamps of k3 are verl's.
    """
    check_choice("kl_estimator", objective.kl_estimator, KL_ESTIMATORS)
    if objective.kl_estimator == "k1":
        return log_probs_K - ref_log_probs_K
    if objective.kl_estimator == "k2":
        return 0.5 * (log_probs_K - ref_log_probs_K).square()
    gap = _clamp(ref_log_probs_K - log_probs_K, objective.kl_log_ratio_clamp)
    return _clamp(torch.exp(gap) - gap - 1, objective.kl_clamp)


def kl_penalty(log_probs_K: Tensor, ref_log_probs_K: Tensor | None, objective: Objective) -> Tensor:
    """Return ``kl_coef`` times the estimate, without gradient, to subtract from each token's reward; shape [K]."""
    if ref_log_probs_K is None:
        raise InputError(
            "ref_log_probs_K is missing: a KL in the reward needs log-probs of a reference model; "
            "provide them or set kl_coef=0."
        )
    check_same_length(log_probs_K=log_probs_K, ref_log_probs_K=ref_log_probs_K)
    return objective.kl_coef * kl_estimate(log_probs_K.detach(), ref_log_probs_K.detach(), objective)


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
