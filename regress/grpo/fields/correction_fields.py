"""Corrections for a sampler that is not the policy: weights, rejection, masks, and the old log-probs."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.objective_field import value

SAMPLER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CORRECTION_POLICIES = ("old", "current")
OLD_LOG_PROBS = ("recompute", "sampler", "current")


@dataclass
class CorrectionFields:
    """Corrections for the rollout engine."""

    sampler_correction: str = value(
        "none",
        "weights p_old / p_sampler on the policy loss, per token or as product over the sequence: truncate "
        "clamps them to [correction_min, correction_max], mask zeroes those outside",
        choices=SAMPLER_CORRECTIONS,
    )
    correction_min: float | None = value(None, "lower bound of the sampler correction weight", minimum=0.0)
    correction_max: float | None = value(None, "upper bound of the sampler correction weight", minimum=0.0)
    correction_log_clamp: float | None = value(
        None,
        "the log of a sampler weight, or the log-ratio of a rejection, is clamped to this absolute value",
        minimum=0.0,
    )
    correction_normalize: bool = value(
        False,
        "divide the sampler weights by their mean over the tokens (samples, for sequence weights) of the batch",
    )
    correction_policy: str = value(
        "old",
        "policy of sampler weights and rejection: old (before the update) or current (that of the forward pass; verl's "
        "bypass mode, with old_log_probs=sampler)",
        choices=CORRECTION_POLICIES,
    )
    rejection: str | None = value(
        None,
        "tokens left out because policy and sampler differ: criteria criterion:bound or criterion:low:high, separated "
        "by commas, all of which a token must meet, such as seq_mean_k1:0.999:1.001,token_k3:0.1; bounds of k1 are "
        "those of p_sampler / p",
    )
    mask_truncated_completions: bool = value(
        False, "leave completions that were cut at the maximal length out of the loss"
    )
    old_log_probs: str = value(
        "recompute",
        "log-probs in the denominator of r: recompute (by the trainer before the update), sampler (as sampled), or "
        "current (the values of the forward pass that is updated, which saves one forward pass; r is 1, so a "
        "rollout gets exactly one update)",
        choices=OLD_LOG_PROBS,
    )
