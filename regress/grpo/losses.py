"""Loss of every token before aggregation, and its parts."""

# ruff: noqa: N815  (the suffix of a field is its shape)

from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.checks import check_choice
from regress.grpo.inputs import InputError, check_finite, check_same_length, check_sequences
from regress.grpo.kl import kl_estimate
from regress.grpo.objective import LOSSES, Objective
from regress.grpo.ratios import importance_ratio, sampler_weights
from regress.grpo.segments import SumOverContextParallel, alone


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token and its parts, all of shape [K]; only ``loss_K`` carries a gradient.

    ``loss_K = policy_K + kl_coef * kl_K - entropy_coef * entropy_K``, terms of coefficient 0 left out.

    Attributes:
        policy_K: policy loss, sampler correction included.
        kl_K: KL estimate as it enters the loss (clamped, bias-corrected), or None if none does.
        entropy_K: entropy as given, or None.
        ratio_K: importance ratio at the objective's level, after the log-ratio clamp, before any clip.
        log_ratio_K: log p - log p_old of the token itself.
        correction_K: sampler correction weights, or None without correction.
        clipped_low_K, clipped_high_K: True where the ratio is below (above) its clip range while the
            advantage is negative (positive): for ppo_clip, the tokens that give no policy gradient.
        dual_clipped_K: True where the dual clip replaced the loss.
    """

    loss_K: Tensor
    policy_K: Tensor
    kl_K: Tensor | None
    entropy_K: Tensor | None
    ratio_K: Tensor
    log_ratio_K: Tensor
    correction_K: Tensor | None
    clipped_low_K: Tensor
    clipped_high_K: Tensor
    dual_clipped_K: Tensor


def token_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    sequence_K: Tensor,
    num_sequences: int,
    objective: Objective,
    *,
    ref_log_probs_K: Tensor | None = None,
    sampler_log_probs_K: Tensor | None = None,
    entropy_K: Tensor | None = None,
    sum_over_context_parallel: SumOverContextParallel = alone,
) -> TokenLoss:
    """Return the loss to minimize for each loss token of a batch or microbatch that holds whole samples.

    Where several processes hold parts of the same samples, under the same numbers, ``sum_over_context_parallel`` adds
    them up. Gradients flow through ``log_probs_K`` and ``entropy_K`` only.

    Raises:
        InputError: shapes or order that do not match, values that are not finite, or log-probs that the
            objective asks for and nobody gave. ConfigError: an unknown loss, level, estimator or correction.

    Sources: ppo_clip arXiv 1707.06347, dual clip 1912.09729, separate clip constants (DAPO) 2503.14476,
    delta (INTELLECT-2) 2505.07291, cispo 2506.13585; KL bias correction as in TRL and DeepSeek-V3.2.
    """
    check_sequences(sequence_K, num_sequences)
    check_same_length(
        sequence_K=sequence_K,
        log_probs_K=log_probs_K,
        old_log_probs_K=old_log_probs_K,
        advantages_K=advantages_K,
        ref_log_probs_K=ref_log_probs_K,
        sampler_log_probs_K=sampler_log_probs_K,
        entropy_K=entropy_K,
    )
    for name, values_K in (
        ("log_probs", log_probs_K),
        ("old_log_probs", old_log_probs_K),
        ("advantages", advantages_K),
    ):
        check_finite(f"{name}_K", values_K)
    advantages_K = advantages_K.detach()
    ratio_K = importance_ratio(
        log_probs_K, old_log_probs_K, sequence_K, num_sequences, objective, sum_over_context_parallel
    )
    policy_K = _policy_loss(log_probs_K, ratio_K, advantages_K, objective)
    policy_K, dual_clipped_K = _dual_clip(policy_K, advantages_K, objective)
    correction_K = None
    if objective.sampler_correction != "none":
        sampler = _given("sampler_log_probs_K", sampler_log_probs_K, "sampler_correction", "none")
        samples = (sequence_K, num_sequences)
        correction_K = sampler_weights(
            old_log_probs_K, sampler, *samples, objective, sum_over_context_parallel
        )
        policy_K = policy_K * correction_K
    kl_K = _kl(log_probs_K, ref_log_probs_K, ratio_K, objective) if objective.kl_in_loss else None
    low, high = objective.clip_range
    clips = objective.loss in ("ppo_clip", "cispo")
    return TokenLoss(
        loss_K=_total(policy_K, kl_K, entropy_K, objective),
        policy_K=policy_K.detach(),
        kl_K=None if kl_K is None else kl_K.detach(),
        entropy_K=None if entropy_K is None else entropy_K.detach(),
        ratio_K=ratio_K.detach(),
        log_ratio_K=(log_probs_K - old_log_probs_K).detach(),
        correction_K=correction_K,
        clipped_low_K=(ratio_K < low) & (advantages_K < 0) & clips,
        clipped_high_K=(ratio_K > high) & (advantages_K > 0) & clips,
        dual_clipped_K=dual_clipped_K,
    )


def _dual_clip(policy_K: Tensor, advantages_K: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return the policy loss below its cap where advantages are negative, and where the cap applies."""
    if objective.dual_clip is None:
        return policy_K, torch.zeros_like(policy_K, dtype=torch.bool)
    cap_K = -objective.dual_clip * advantages_K
    negative_K = advantages_K < 0
    capped_K = torch.where(negative_K, torch.minimum(policy_K, cap_K), policy_K)
    return capped_K, negative_K & (policy_K > cap_K)


def _kl(log_probs_K: Tensor, ref_log_probs_K: Tensor | None, ratio_K: Tensor, objective: Objective) -> Tensor:
    reference_K = _given("ref_log_probs_K", ref_log_probs_K, "kl_coef", "0").detach()
    check_finite("ref_log_probs_K", reference_K)
    kl_K = kl_estimate(log_probs_K, reference_K, objective)
    return kl_K * ratio_K if objective.kl_bias_correction else kl_K


def _total(policy_K: Tensor, kl_K: Tensor | None, entropy_K: Tensor | None, objective: Objective) -> Tensor:
    """Return the sum of the terms with their coefficients."""
    loss_K = policy_K if kl_K is None else policy_K + objective.kl_coef * kl_K
    if objective.entropy_coef == 0.0:
        return loss_K
    entropy_K = _given("entropy_K", entropy_K, "entropy_coef", "0")
    check_finite("entropy_K", entropy_K.detach())
    return loss_K - objective.entropy_coef * entropy_K


def _policy_loss(log_probs_K: Tensor, ratio_K: Tensor, advantages_K: Tensor, objective: Objective) -> Tensor:
    check_choice("loss", objective.loss, LOSSES)
    if objective.loss == "reinforce":
        return -log_probs_K * advantages_K
    if objective.loss == "importance_sampling":
        return -ratio_K * advantages_K
    clipped_K = ratio_K.clamp(*objective.clip_range)
    if objective.loss == "cispo":
        return -clipped_K.detach() * advantages_K * log_probs_K
    if objective.delta is not None:
        ratio_K = ratio_K.clamp(max=objective.delta)
    return -torch.minimum(ratio_K * advantages_K, clipped_K * advantages_K)


def _given(name: str, values_K: Tensor | None, setting: str, off: str) -> Tensor:
    if values_K is None:
        raise InputError(f"{name} is missing: {setting} needs it; provide it or set {setting}={off}.")
    return values_K
