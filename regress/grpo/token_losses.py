"""Loss of every token before aggregation, and its parts."""

# ruff: noqa: N815  (the suffix of a field is its shape)

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError, check_finite, check_same_length, check_sequences
from regress.grpo.fields import ObjectiveFields
from regress.grpo.importance_ratios import importance_ratio
from regress.grpo.kl_divergence import kl_estimate
from regress.grpo.objective_checks import check_choice
from regress.grpo.policy_losses import LOSSES, PolicyInputs
from regress.grpo.sampler_corrections import accepted
from regress.grpo.sampler_corrections import sampler_weights as sampler_weights
from regress.grpo.segment_sums import SumOverContextParallel, alone
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import Compared, TokenSelection, marks_of


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token and its parts, all of shape [K]; only ``loss_K`` carries a gradient.

    ``loss_K = policy_K + kl_coef * kl_K - entropy_coef * entropy_K``, terms of coefficient 0 left out; where
    ``entropy_term_K`` is given, it stands for ``entropy_K``.

    Attributes:
        policy_K: policy loss, sampler correction and masks included.
        kl_K: KL estimate as it enters the loss (clamped, bias-corrected), or None if none does.
        entropy_K: entropy as given, or None.
        ratio_K: importance ratio at the objective's level, after the log-ratio clamp, before any clip.
        log_ratio_K: log p - log p_old of the token itself.
        correction_K: sampler correction weights, or None without correction.
        clipped_low_K, clipped_high_K: True where the ratio is below (above) its clip range while the
            advantage is negative (positive): for ppo_clip, the tokens that give no policy gradient.
        dual_clipped_K: True where the dual clip replaced the loss.
        entropy_term_K: entropy as it enters the loss, where that is not aggregated like the policy loss.
        kept_K: True where the policy loss counts: the tokens that no mask of the objective leaves out; None without.
        accepted_K: True where rejection by the current policy leaves a token in the loss mask; None without rejection.
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
    entropy_term_K: Tensor | None = None
    kept_K: Tensor | None = None
    accepted_K: Tensor | None = None

    def select(self, index: Tensor) -> TokenLoss:
        """Return the loss of the tokens at ``index``."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **{name: value[index] for name, value in given.items()})


def entropy_in_loss(loss: TokenLoss) -> Tensor | None:
    """Return the entropy of each token as it enters the loss, None without any."""
    return loss.entropy_K if loss.entropy_term_K is None else loss.entropy_term_K


@dataclass(frozen=True)
class _Given:
    """Values of the tokens beside the log-probs of the policy, None where they are not given."""

    old: Tensor
    advantages: Tensor
    reference: Tensor | None
    sampler: Tensor | None
    entropy: Tensor | None
    correction: Tensor | None
    samples: Samples


def token_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    sequence_K: Tensor,
    num_sequences: int,
    objective: ObjectiveFields,
    *,
    ref_log_probs_K: Tensor | None = None,
    sampler_log_probs_K: Tensor | None = None,
    entropy_K: Tensor | None = None,
    sum_over_context_parallel: SumOverContextParallel = alone,
    marks: TokenSelection | None = None,
    entropy_scale_K: Tensor | None = None,
    correction_K: Tensor | None = None,
) -> TokenLoss:
    """Return the loss to minimize for each loss token of a batch or microbatch that holds whole samples.

    Where several processes hold parts of the same samples, under the same numbers, ``sum_over_context_parallel`` adds
    them up. Gradients flow through ``log_probs_K`` and ``entropy_K`` only.

    Args:
        marks: what comparisons with the other tokens of the mini-batch tell (`regress.grpo.token_selection`); by
            default the tokens given are compared with each other.
        entropy_scale_K: weight of each token's entropy over the weight of its loss, where the two differ
            (``entropy_aggregation="token-mean"``), marks that are given included.
        correction_K: sampler weights that were computed before, such as those normalized over a whole rollout.

    Raises:
        InputError: shapes or order that do not match, values that are not finite, or log-probs that the
            objective asks for and that is not given. ConfigError: an unknown loss, level, estimator or correction.

    Sources: see `regress.grpo.objective_catalogue.LOSSES`; KL bias correction as in TRL and DeepSeek-V3.2.
    """
    check_choice("loss", objective.loss, LOSSES)
    check_sequences(sequence_K, num_sequences)
    check_same_length(
        sequence_K=sequence_K,
        log_probs_K=log_probs_K,
        old_log_probs_K=old_log_probs_K,
        advantages_K=advantages_K,
        ref_log_probs_K=ref_log_probs_K,
        sampler_log_probs_K=sampler_log_probs_K,
        entropy_K=entropy_K,
        entropy_scale_K=entropy_scale_K,
        correction_K=correction_K,
    )
    for name, values_K in (
        ("log_probs", log_probs_K),
        ("old_log_probs", old_log_probs_K),
        ("advantages", advantages_K),
    ):
        check_finite(f"{name}_K", values_K)
    samples = Samples(sequence_K, num_sequences, sum_over_context_parallel)
    rest = ref_log_probs_K, sampler_log_probs_K, entropy_K, correction_K
    given = _Given(old_log_probs_K, advantages_K.detach(), *rest, samples)
    found = _marks(log_probs_K, given, objective) if marks is None else marks
    if marks is None:
        entropy_scale_K = _scale_of_kept(entropy_scale_K, found, objective)
    return _token_loss(log_probs_K, given, found, entropy_scale_K, objective)


def _token_loss(
    log_probs_K: Tensor,
    given: _Given,
    marks: TokenSelection,
    scale_K: Tensor | None,
    objective: ObjectiveFields,
) -> TokenLoss:
    samples, advantages_K = given.samples, given.advantages
    of_samples = samples.sequence_K, samples.count
    ratio_K = importance_ratio(log_probs_K, given.old, *of_samples, objective, samples.complete)
    correction_K = _correction(log_probs_K, given, objective)
    inputs = PolicyInputs(log_probs_K, given.old, ratio_K, advantages_K, samples, correction_K, marks)
    policy_K = _policy_loss(log_probs_K, ratio_K, advantages_K, objective, inputs)
    policy_K, dual_clipped_K = _dual_clip(policy_K, advantages_K, objective)
    accepted_K = _accepted(log_probs_K, given, objective)
    kept_K, factor_K = _kept(log_probs_K, given, marks, accepted_K, objective)
    if factor_K is not None:
        policy_K = policy_K * factor_K
    if correction_K is not None and not LOSSES[objective.loss].weighs:
        policy_K = policy_K * correction_K
    kl_K = _kl(log_probs_K, given.reference, ratio_K, objective) if objective.kl_in_loss else None
    entropy_K = _entropy_term(given.entropy, scale_K, objective)
    low_K, high_K = _clipped(inputs, objective)
    return TokenLoss(
        loss_K=_total(policy_K, kl_K, entropy_K, objective),
        policy_K=policy_K.detach(),
        kl_K=None if kl_K is None else kl_K.detach(),
        entropy_K=None if given.entropy is None else given.entropy.detach(),
        ratio_K=ratio_K.detach(),
        log_ratio_K=(log_probs_K - given.old).detach(),
        correction_K=correction_K,
        clipped_low_K=low_K,
        clipped_high_K=high_K,
        dual_clipped_K=dual_clipped_K,
        entropy_term_K=None if scale_K is None or entropy_K is None else entropy_K.detach(),
        kept_K=kept_K,
        accepted_K=accepted_K,
    )


def _marks(log_probs_K: Tensor, given: _Given, objective: ObjectiveFields) -> TokenSelection:
    """Return the marks of the tokens among each other."""
    compared = Compared(
        log_probs_K.detach(),
        given.old.detach(),
        given.advantages,
        given.samples,
        None if given.entropy is None else given.entropy.detach(),
        given.sampler,
    )
    return marks_of(compared, objective)


def _policy_loss(
    log_probs_K: Tensor,
    ratio_K: Tensor,
    advantages_K: Tensor,
    objective: ObjectiveFields,
    inputs: PolicyInputs,
) -> Tensor:
    """Return the policy loss of each token, before dual clip, masks and sampler weights."""
    inputs = replace(inputs, log_probs=log_probs_K, ratio=ratio_K, advantages=advantages_K)
    found: Tensor = LOSSES[objective.loss].function()(inputs, objective)
    return found


def _dual_clip(policy_K: Tensor, advantages_K: Tensor, objective: ObjectiveFields) -> tuple[Tensor, Tensor]:
    """Return the policy loss below its cap where advantages are negative, and where the cap applies."""
    if objective.dual_clip is None:
        return policy_K, torch.zeros_like(policy_K, dtype=torch.bool)
    cap_K = -objective.dual_clip * advantages_K
    negative_K = advantages_K < 0
    capped_K = torch.where(negative_K, torch.minimum(policy_K, cap_K), policy_K)
    return capped_K, negative_K & (policy_K > cap_K)


@torch.no_grad()
def _clipped(t: PolicyInputs, objective: ObjectiveFields) -> tuple[Tensor, Tensor]:
    """Return where the loss holds a move down (A < 0) or up (A > 0) back."""
    below, above = LOSSES[objective.loss].clipped(t, objective)
    return below & (t.advantages < 0), above & (t.advantages > 0)


def _correction(log_probs_K: Tensor, given: _Given, objective: ObjectiveFields) -> Tensor | None:
    """Return the sampler weights, those that were given if there are any."""
    if objective.sampler_correction == "none":
        return None
    if given.correction is not None:
        return given.correction.detach()
    sampler = _required("sampler_log_probs_K", given.sampler, "sampler_correction", "none")
    policy_K = log_probs_K if objective.correction_policy == "current" else given.old
    samples = given.samples
    return sampler_weights(policy_K, sampler, samples.sequence_K, samples.count, objective, samples.complete)


@torch.no_grad()
def _accepted(log_probs_K: Tensor, given: _Given, objective: ObjectiveFields) -> Tensor | None:
    """Return the tokens that rejection by the current policy leaves, None where there is none of it."""
    if objective.rejection is None or objective.correction_policy != "current":
        return None
    sampler = _required("sampler_log_probs_K", given.sampler, "rejection", "null")
    return accepted(log_probs_K, sampler, given.samples, objective)


@torch.no_grad()
def _kept(
    log_probs_K: Tensor,
    given: _Given,
    marks: TokenSelection,
    accepted_K: Tensor | None,
    objective: ObjectiveFields,
) -> tuple[Tensor | None, Tensor | None]:
    """Return where the policy loss counts, and the factor that says so; None without masks."""
    kept_K, factor_K = marks.kept_K, None
    if objective.off_policy_threshold is not None:
        near_K = _on_policy(log_probs_K, given, objective)
        kept_K = near_K if kept_K is None else kept_K & near_K
    if accepted_K is not None:
        if objective.aggregation == "seq-mean-token-mean":  # the mean is over the tokens that are left
            factor_K = accepted_K / given.samples.mean(accepted_K.to(log_probs_K.dtype)).clamp(min=1e-8)
        kept_K = accepted_K if kept_K is None else kept_K & accepted_K
    if kept_K is None:
        return None, None
    return kept_K, kept_K.to(log_probs_K.dtype) if factor_K is None else factor_K * kept_K


def _on_policy(log_probs_K: Tensor, given: _Given, objective: ObjectiveFields) -> Tensor:
    """Return the tokens of advantage 0 or more, and those of samples near the policy (DeepSeek-V3.2, eq. 9)."""
    other = given.old
    if objective.off_policy_reference == "sampler":
        other = _required("sampler_log_probs_K", given.sampler, "off_policy_reference", "old")
    gap_K = torch.nan_to_num(other - log_probs_K, nan=0.0)
    assert objective.off_policy_threshold is not None
    near_K = given.samples.mean(gap_K) <= objective.off_policy_threshold
    return near_K | (given.advantages >= 0)


def _kl(
    log_probs_K: Tensor, ref_log_probs_K: Tensor | None, ratio_K: Tensor, objective: ObjectiveFields
) -> Tensor:
    reference_K = _required("ref_log_probs_K", ref_log_probs_K, "kl_coef", "0").detach()
    check_finite("ref_log_probs_K", reference_K)
    kl_K = kl_estimate(log_probs_K, reference_K, objective)
    return kl_K * ratio_K if objective.kl_bias_correction else kl_K


def _scale_of_kept(
    scale_K: Tensor | None, marks: TokenSelection, objective: ObjectiveFields
) -> Tensor | None:
    """Return the scale of entropies for a mean over the tokens that the entropy quantile keeps among those given."""
    if scale_K is None or objective.top_entropy_quantile >= 1.0 or marks.kept_K is None:
        return scale_K
    kept_K = marks.kept_K
    return scale_K * kept_K * (len(kept_K) / max(int(kept_K.sum()), 1))


def _entropy_term(
    entropy_K: Tensor | None, scale_K: Tensor | None, objective: ObjectiveFields
) -> Tensor | None:
    """Return the entropy as it enters the loss."""
    if objective.entropy_coef == 0.0:
        return entropy_K
    entropy_K = _required("entropy_K", entropy_K, "entropy_coef", "0")
    check_finite("entropy_K", entropy_K.detach())
    if scale_K is not None:
        return entropy_K * scale_K.to(entropy_K.dtype)
    if objective.entropy_aggregation == "token-mean" and (
        objective.aggregation != "token-mean" or objective.denominator_scope != objective.entropy_scope
    ):
        raise InputError("""entropy_scale_K is missing: entropy_aggregation=token-mean weighs entropies otherwise than
        losses; provide what regress.grpo.loss_aggregation.entropy_scale returns or set entropy_aggregation=loss.""")
    return entropy_K


def _total(
    policy_K: Tensor, kl_K: Tensor | None, entropy_K: Tensor | None, objective: ObjectiveFields
) -> Tensor:
    """Return the sum of the terms with their coefficients."""
    loss_K = policy_K if kl_K is None else policy_K + objective.kl_coef * kl_K
    if objective.entropy_coef == 0.0 or entropy_K is None:
        return loss_K
    return loss_K - objective.entropy_coef * entropy_K


def _required(name: str, values_K: Tensor | None, setting: str, off: str) -> Tensor:
    if values_K is None:
        raise InputError(f"{name} is missing: {setting} needs it; provide it or set {setting}={off}.")
    return values_K
