"""Policy losses: one function for each, from the ratio, the advantage and the log-prob of a token to its loss.

A function and the entry above it are all that a loss is made of, but for fields of its own (`regress.grpo.fields`).
Imports no torch: it is imported by functions that need more than the methods of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from regress.grpo.objective_part import Part

if TYPE_CHECKING:
    from torch import Tensor

    from regress.grpo.fields import ObjectiveFields
    from regress.grpo.token_losses import TokenLoss
    from regress.grpo.token_samples import Samples
    from regress.grpo.token_selection import TokenSelection

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
    marks: TokenSelection

    @property
    def log_ratio(self) -> Tensor:
        """Differentiable log p - log p_old of the token itself."""
        return self.log_probs - self.old_log_probs.detach()


Conflicts = Iterator[tuple[str, str]]
Clipped = tuple["Tensor", "Tensor"]


def _unclipped(t: PolicyInputs, o: ObjectiveFields) -> Clipped:
    nowhere = t.ratio.new_zeros(t.ratio.shape).bool()
    return nowhere, nowhere


def _beyond_range(t: PolicyInputs, o: ObjectiveFields) -> Clipped:
    low, high = o.clip_range
    return t.ratio < low, t.ratio > high


def _beyond_trust(t: PolicyInputs, o: ObjectiveFields) -> Clipped:
    untrusted = trusted(t, o) == 0
    return untrusted, untrusted


def _beyond_distance(t: PolicyInputs, o: ObjectiveFields) -> Clipped:
    beyond = (t.log_ratio < -o.clip_low) | (t.log_ratio > o.clip_high)
    return beyond, beyond


def _verl_clipped(loss: TokenLoss, o: ObjectiveFields) -> Clipped:
    return loss.clipped_low_K | loss.clipped_high_K, loss.dual_clipped_K


def _verl_any_side(loss: TokenLoss, o: ObjectiveFields) -> Clipped:
    low, high = o.clip_range
    return (loss.ratio_K < low) | (loss.ratio_K > high), loss.dual_clipped_K


def _verl_drawn(loss: TokenLoss, o: ObjectiveFields) -> Clipped:
    return _verl_clipped(loss, o) if loss.kept_K is None else (~loss.kept_K, loss.dual_clipped_K)


def _verl_sides(loss: TokenLoss, o: ObjectiveFields) -> Clipped:
    return loss.clipped_high_K, loss.clipped_low_K


def _verl_capped(loss: TokenLoss, o: ObjectiveFields) -> Clipped:
    clipped, lower = _verl_clipped(loss, o)
    return clipped, lower if o.delta is None else (loss.ratio_K > o.delta) & ~clipped


def _possible(o: ObjectiveFields) -> Conflicts:
    yield from ()


def _encloses_one(o: ObjectiveFields) -> Conflicts:
    low, high = o.clip_range
    if low <= high and not low <= 1.0 <= high:
        yield (
            bounds_in_words(o),
            f"the ratio would be clipped to [{low:g}, {high:g}]; choose bounds that enclose 1",
        )


def _has_distances(o: ObjectiveFields) -> Conflicts:
    if o.clip_bounds == "absolute":
        rule = "clip_low and clip_high are distances there, not bounds of the ratio; use clip_bounds=offset"
        yield f"clip_bounds=absolute with loss={o.loss}", rule


def _has_beta(o: ObjectiveFields) -> Conflicts:
    if o.dro_beta is None:
        yield "loss=dro without dro_beta", "there is no agreed default; set dro_beta"


def bounds_in_words(o: ObjectiveFields) -> str:
    """Return the bounds of the ratio as they are set."""
    return f"clip_low={o.clip_low:g} with clip_high={o.clip_high:g} and clip_bounds={o.clip_bounds}"


@dataclass(frozen=True)
class Loss(Part):
    """Policy loss.

    Attributes:
        on_ratio: False if the ratio of the policies is not in it.
        clips_ratio: True if ``clip_low`` and ``clip_high`` are bounds of the ratio.
        clipped: where the ratio, or what stands for it, is below and above its bounds, bool ``[K]`` each.
        marks: ``module:function`` that compares the tokens of a batch and returns a `TokenSelection`; empty without.
        leaves_out: True if these leave tokens out of the loss.
        weighs: True if the sampler's weights are in the loss already.
        pseudocode: the formula in the words of an exported objective; by default ``text``. ``{ratio}`` is the ratio
            under its cap.
        wire: name of the loss on the wires of a training service; empty where they have none.
        verl: what verl counts as clipped, and as clipped below, bool ``[K]`` each.
        verl_absolute_kl: True if verl reports the mean of ``|log p_old - log p|`` as ``actor/ppo_kl``.
        trl: TRL's metrics of clipped tokens: ``clip_ratio`` of both sides, ``cispo_clip_ratio``, or none.
        conflicts: yields what is impossible with it, as (culprit, rule and remedy).
    """

    on_ratio: bool = True
    clips_ratio: bool = False
    clipped: Callable[[PolicyInputs, ObjectiveFields], Clipped] = _unclipped
    marks: str = ""
    leaves_out: bool = False
    weighs: bool = False
    pseudocode: str = ""
    wire: str = ""
    verl: Callable[[TokenLoss, ObjectiveFields], Clipped] = _verl_clipped
    verl_absolute_kl: bool = False
    trl: str = ""
    conflicts: Callable[[ObjectiveFields], Conflicts] = _possible

    @property
    def clips(self) -> bool:
        """True if ``clip_low`` and ``clip_high`` are bounds of anything."""
        return self.clipped is not _unclipped


_LOSSES: dict[str, Loss] = {}
LOSSES = MappingProxyType(_LOSSES)
"""Policy losses by name."""

Function = Callable[[PolicyInputs, "ObjectiveFields"], "Tensor"]


def _loss(text: str, source: str, *, name: str = "", **facts: Any) -> Callable[[Function], Function]:
    """Return the decorator that enters a function into the catalogue, by default under its own name."""

    def enter(function: Function) -> Function:
        _LOSSES[name or function.__name__] = Loss(text, source, f"policy_losses:{function.__name__}", **facts)
        return function

    return enter


@_loss(
    "-min(r A, clip(r) A)",
    "arXiv 1707.06347; separate bounds 2503.14476; delta 2505.07291; dual clip 1912.09729",
    reads=("delta", "dual_clip"),
    clips_ratio=True,
    clipped=_beyond_range,
    pseudocode="-min({ratio} * advantage, clamp(ratio, *clip_range) * advantage)",
    wire="ppo",
    trl="clip_ratio",
    conflicts=_encloses_one,
)
def ppo_clip(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-min(r A, clip(r) A)``, r at most ``delta`` in the first branch, the loss at most ``-c A`` if A < 0.

    Sources: arXiv 1707.06347, eq. 7; DAPO 2503.14476; delta 2505.07291; dual clip 1912.09729, eq. 5.
    """
    clipped = t.ratio.clamp(*o.clip_range)
    ratio = t.ratio if o.delta is None else t.ratio.clamp(max=o.delta)
    return -(ratio * t.advantages).minimum(clipped * t.advantages)


@_loss(
    "-sg(clip(r)) A log p",
    "arXiv 2506.13585; TRL 1.16 loss_type=cispo; verl 0.9 cispo",
    clips_ratio=True,
    clipped=_beyond_range,
    pseudocode="-stop_gradient(clamp(ratio, *clip_range)) * advantage * log_prob",
    wire="cispo",
    verl=_verl_any_side,
    trl="cispo_clip_ratio",
)
def cispo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-sg(clip(r)) A log p`` (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    return -t.ratio.clamp(*o.clip_range).detach() * t.advantages * t.log_probs


@_loss("-r A", "arXiv 1509.08731", pseudocode="-ratio * advantage", wire="importance_sampling")
def importance_sampling(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-r A``."""
    return -t.ratio * t.advantages


@_loss(
    "-A log p",
    "Williams 1992; verl 0.9 gpg, bypass_mode with loss_type=reinforce",
    on_ratio=False,
    pseudocode="-advantage * log_prob",
    wire="cross_entropy",
)
def reinforce(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-A log p``."""
    return -t.log_probs * t.advantages


@_loss(
    "-(4 / tau) sigmoid(tau (r - 1)) A with tau = sapo_tau_pos where A > 0, else sapo_tau_neg",
    "arXiv 2511.20347; TRL 1.16 loss_type=sapo; verl 0.9 sapo",
    reads=("sapo_tau_pos", "sapo_tau_neg"),
)
def sapo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-(4 / tau) sigmoid(tau (r - 1)) A`` (arXiv 2511.20347, eq. 5; TRL 1.16; verl 0.9)."""
    import torch

    tau = torch.where(t.advantages > 0, o.sapo_tau_pos, o.sapo_tau_neg).to(t.ratio.dtype)
    return -(tau * (t.ratio - 1.0)).sigmoid() * 4.0 / tau * t.advantages


@_loss(
    "-sg(exp(lambda) w^k exp(-lambda w)) A log p with w the product of r over the sample, times that of its "
    "sampler weights; k and lambda by the sign of A",
    "arXiv 2602.10693; TRL 1.16 GRPOTrainer.get_gamma_weights",
    reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    weighs=True,
)
def vespo(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-phi(w) A log p`` with ``phi(w) = exp(lambda (1 - w)) w^k`` of the sample's weight w, no gradient.

    w is the product of the token ratios of the sample and of its sampler weights. Source: arXiv 2602.10693; TRL 1.16
    ``GRPOTrainer.get_gamma_weights``, clamps included.
    """
    return -vespo_weight(t, o) * t.advantages * t.log_probs


def vespo_weight(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return the weight phi of `vespo` at each token, [K]."""
    import torch

    total = t.samples.sum(t.log_ratio.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT))
    if t.correction is not None:
        log_correction = t.correction.log().clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
        whole = o.sampler_correction.startswith("sequence")
        total = total + (t.samples.mean if whole else t.samples.sum)(log_correction)
    log_weight = total.clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    positive = t.advantages >= 0
    k = torch.where(positive, o.vespo_k_pos, o.vespo_k_neg).to(total.dtype)
    decay = torch.where(positive, o.vespo_lambda_pos, o.vespo_lambda_neg).to(total.dtype).clamp(min=1e-4)
    weight = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return weight.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).detach()


@_loss(
    "-mean(A) exp(mean of the clipped log r over the sample); log r is clipped to [-clip_low, clip_high] "
    "where that is the lesser improvement",
    "GMPO, arXiv 2507.20673, eq. 4; verl 0.9 geo_mean",
    clipped=_beyond_distance,
    weighs=True,
    verl=_verl_sides,
    conflicts=_has_distances,
)
def geo_mean(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-mean(A) exp(mean of the clipped log-ratio)`` of the sample at each of its tokens.

    The log-ratio is clipped to ``[-clip_low, clip_high]`` on the side that the sign of A makes pessimistic; sampler
    weights enter as their geometric mean. Source: GMPO, arXiv 2507.20673, eq. 4; verl 0.9
    ``compute_policy_loss_geo_mean``.
    """
    sign = t.advantages.sign()
    clipped = t.log_ratio.clamp(-o.clip_low, o.clip_high)
    lesser = sign * (sign * t.log_ratio).minimum(sign * clipped)
    loss = -t.samples.mean(t.advantages) * t.samples.mean(lesser).exp()
    if t.correction is None:
        return loss
    return loss * t.samples.mean((t.correction + 1e-10).log()).exp()


@_loss(
    "dppo_tv with the binary KL of p_old from p as the distance",
    "arXiv 2602.04879; verl 0.9 dppo_kl",
    name="dppo_kl",
    reads=("delta",),
    clipped=_beyond_trust,
    verl=_verl_capped,
    conflicts=_has_distances,
)
@_loss(
    "-sg(min(r, delta)) A log p; 0 where p - p_old is beyond clip_high (A > 0) or below -clip_low (A <= 0)",
    "arXiv 2602.04879; verl 0.9 dppo_tv",
    reads=("delta",),
    clipped=_beyond_trust,
    verl=_verl_capped,
    conflicts=_has_distances,
)
def dppo_tv(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-sg(min(r, delta)) A log p`` where p is within the trust region, 0 elsewhere (arXiv 2602.04879)."""
    weight = t.ratio.detach() if o.delta is None else t.ratio.detach().clamp(max=o.delta)
    return -t.advantages * weight * t.log_probs * trusted(t, o)


def trusted(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return 1 where DPPO trusts a token and 0 elsewhere, [K]; the trust region is one of probabilities.

    The distance is ``|p - p_old|`` (dppo_tv) or the KL between the token and all others together (dppo_kl), and only a
    move in the direction of the advantage is held back. Source: arXiv 2602.04879; verl 0.9 ``dppo_tv``, ``dppo_kl``.
    """
    import torch

    new, old = t.log_probs.exp(), t.old_log_probs.exp()
    up = t.advantages > 0
    if o.loss == "dppo_tv":
        return torch.where(up, new - old <= o.clip_high, new - old >= -o.clip_low).to(new.dtype)
    rest = ((1.0 - old + FLOOR) / (1.0 - new + FLOOR)).log()
    distance = old * (t.old_log_probs - t.log_probs) + (1.0 - old) * rest
    return torch.where(
        up, (distance <= o.clip_high) | (new <= old), (distance <= o.clip_low) | (new >= old)
    ).to(new.dtype)


@_loss(
    "-A log p + dro_beta / 2 (log r)^2",
    "arXiv 2405.19107, token by token; verl 0.9 dro",
    reads=("dro_beta",),
    conflicts=_has_beta,
)
def dro(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-A log p + beta / 2 (log p - log p_old)^2`` (Richemond et al., arXiv 2405.19107, token by token)."""
    assert o.dro_beta is not None
    return -t.log_probs * t.advantages + o.dro_beta / 2 * t.log_ratio.square()


@_loss(
    "ppo_clip, and 0 for a share cov_fraction of tokens, drawn from those unclipped ones whose (A - mean A) "
    "(log p - mean log p) lies between cov_low and cov_high",
    "arXiv 2505.22617; verl 0.9 clip_cov",
    reads=("cov_fraction", "cov_low", "cov_high", "cov_seed"),
    clipped=_beyond_range,
    marks="token_selection:undrawn",
    leaves_out=True,
    verl=_verl_drawn,
)
def clip_cov(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-min(r A, clip(r) A)``; tokens that `token_selection` drew count as 0 (arXiv 2505.22617)."""
    return -(t.ratio * t.advantages).minimum(t.ratio.clamp(*o.clip_range) * t.advantages)


@_loss(
    "-r A, plus cov_kl_coef |log r| for the share cov_fraction of tokens of greatest (A - mean A) "
    "(log p - mean log p)",
    "arXiv 2505.22617; verl 0.9 kl_cov",
    reads=("cov_fraction", "cov_kl_coef"),
    marks="token_selection:penalized",
    verl_absolute_kl=True,
)
def kl_cov(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
    """Return ``-r A``, plus ``cov_kl_coef |log p - log p_old|`` at the marked tokens (arXiv 2505.22617)."""
    assert t.marks.penalized_K is not None
    return -t.ratio * t.advantages + o.cov_kl_coef * t.log_ratio.abs() * t.marks.penalized_K
