"""Policy losses: one function for each, from the ratio, the advantage and the log-prob of a token to its loss.

A function of this module and its entry in `regress.grpo.catalogue.LOSSES` are all that a loss is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regress.grpo.fields import ObjectiveFields
from regress.grpo.marks import Marks
from regress.grpo.samples import Samples

LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT = math.log(1e-8), 20.0
"""Clamps of VESPO: of a token's log-ratio (both ways the greater), of a sampler weight's log and of a sample's."""
FLOOR = 1e-8
"""Added to probabilities that are divided, and to what a mean divides by."""


@dataclass(frozen=True)
class PolicyInputs:
    """Tokens of a batch or microbatch, [K] each; gradients flow through ``log_probs`` and ``ratio``.

    Attributes:
        correction: sampler weights, for losses that weigh by themselves; None without.
        marks: tokens that were told apart by comparison with the others.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    ratio: Tensor
    advantages: Tensor
    samples: Samples
    correction: Tensor | None
    marks: Marks

    @property
    def log_ratio(self) -> Tensor:
        """Differentiable log p - log p_old of the token itself."""
        return self.log_probs - self.old_log_probs.detach()


def ppo_clip(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-min(r A, clip(r) A)``, r at most ``delta`` in the first branch, the loss at most ``-c A`` if A < 0.

    Sources: arXiv 1707.06347, eq. 7; DAPO 2503.14476; delta 2505.07291; dual clip 1912.09729, eq. 5.
    """
    clipped = t.ratio.clamp(*o.clip_range)
    ratio = t.ratio if o.delta is None else t.ratio.clamp(max=o.delta)
    return -torch.minimum(ratio * t.advantages, clipped * t.advantages)


def cispo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-sg(clip(r)) A log p`` (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    return -t.ratio.clamp(*o.clip_range).detach() * t.advantages * t.log_probs


def importance_sampling(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-r A``."""
    return -t.ratio * t.advantages


def reinforce(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-A log p``."""
    return -t.log_probs * t.advantages


def sapo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-(4 / tau) sigmoid(tau (r - 1)) A`` (arXiv 2511.20347, eq. 5; TRL 1.16; verl 0.9)."""
    tau = torch.where(t.advantages > 0, o.sapo_tau_pos, o.sapo_tau_neg).to(t.ratio.dtype)
    return -torch.sigmoid(tau * (t.ratio - 1.0)) * 4.0 / tau * t.advantages


def vespo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-phi(w) A log p`` with ``phi(w) = exp(lambda (1 - w)) w^k`` of the sample's weight w, no gradient.

    w is the product of the token ratios of the sample and of its sampler weights. Source: arXiv 2602.10693; TRL 1.16
    ``GRPOTrainer.get_gamma_weights``, clamps included.
    """
    return -vespo_weight(t, o) * t.advantages * t.log_probs


@torch.no_grad()
def vespo_weight(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return the weight phi of `vespo` at each token, [K]."""
    total = t.samples.sum(t.log_ratio.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT))
    if t.correction is not None:
        log_correction = t.correction.log().clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
        whole = o.sampler_correction.startswith("sequence")
        total = total + (t.samples.mean if whole else t.samples.sum)(log_correction)
    log_weight = total.clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    positive = t.advantages >= 0
    k = torch.where(positive, o.vespo_k_pos, o.vespo_k_neg).to(total.dtype)
    decay = torch.where(positive, o.vespo_lambda_pos, o.vespo_lambda_neg).to(total.dtype).clamp(min=1e-4)
    return torch.exp(decay + k * log_weight - decay * log_weight.exp()).nan_to_num(
        nan=0.0, posinf=0.0, neginf=0.0
    )


def geo_mean(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-mean(A) exp(mean of the clipped log-ratio)`` of the sample at each of its tokens.

    The log-ratio is clipped to ``[-clip_low, clip_high]`` on the side that the sign of A makes pessimistic; sampler
    weights enter as their geometric mean. Source: GMPO, arXiv 2507.20673, eq. 4; verl 0.9
    ``compute_policy_loss_geo_mean``.
    """
    sign = torch.sign(t.advantages)
    clipped = t.log_ratio.clamp(-o.clip_low, o.clip_high)
    lesser = sign * torch.minimum(sign * t.log_ratio, sign * clipped)
    loss = -t.samples.mean(t.advantages) * torch.exp(t.samples.mean(lesser))
    if t.correction is None:
        return loss
    return loss * torch.exp(t.samples.mean((t.correction + 1e-10).log()))


def dppo_tv(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-sg(min(r, delta)) A log p`` where p is within the trust region, 0 elsewhere (arXiv 2602.04879)."""
    weight = t.ratio.detach() if o.delta is None else t.ratio.detach().clamp(max=o.delta)
    return -t.advantages * weight * t.log_probs * trusted(t, o)


dppo_kl = dppo_tv


@torch.no_grad()
def trusted(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return 1 where DPPO trusts a token and 0 elsewhere, [K]; the trust region is one of probabilities.

    The distance is ``|p - p_old|`` (dppo_tv) or the KL between the token and all others together (dppo_kl), and only a
    move in the direction of the advantage is held back. Source: arXiv 2602.04879; verl 0.9 ``dppo_tv``, ``dppo_kl``.
    """
    new, old = t.log_probs.exp(), t.old_log_probs.exp()
    up = t.advantages > 0
    if o.loss == "dppo_tv":
        return torch.where(up, new - old <= o.clip_high, new - old >= -o.clip_low).to(new.dtype)
    rest = torch.log((1.0 - old + FLOOR) / (1.0 - new + FLOOR))
    distance = old * (t.old_log_probs - t.log_probs) + (1.0 - old) * rest
    return torch.where(
        up, (distance <= o.clip_high) | (new <= old), (distance <= o.clip_low) | (new >= old)
    ).to(new.dtype)


def dro(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-A log p + beta / 2 (log p - log p_old)^2`` (Richemond et al., arXiv 2405.19107, token by token)."""
    assert o.dro_beta is not None
    return -t.log_probs * t.advantages + o.dro_beta / 2 * t.log_ratio.square()


def clip_cov(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-min(r A, clip(r) A)``; the tokens that `regress.grpo.marks` drew count as 0 (arXiv 2505.22617)."""
    return -torch.minimum(t.ratio * t.advantages, t.ratio.clamp(*o.clip_range) * t.advantages)


def kl_cov(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-r A``, plus ``cov_kl_coef |log p - log p_old|`` at the marked tokens (arXiv 2505.22617)."""
    assert t.marks.penalized_K is not None
    return -t.ratio * t.advantages + o.cov_kl_coef * t.log_ratio.abs() * t.marks.penalized_K
