"""The policy loss of a token."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.objective_field import value
from regress.grpo.objective_part import described
from regress.grpo.policy_losses import LOSSES

IMPORTANCE_LEVELS = ("token", "sequence", "sequence_product")
SEQUENCE_GRADIENTS = ("sequence", "token")
CLIP_BOUNDS = ("offset", "absolute")
OFF_POLICY_REFERENCES = ("sampler", "old")
STATISTICS_SCOPES = ("global", "microbatch")


@dataclass
class LossFields:
    """Loss, importance ratio and masks of the policy term."""

    loss: str = value(
        "ppo_clip", f"loss of a token with ratio r and advantage A: {described(LOSSES)}", choices=LOSSES
    )
    importance_level: str = value(
        "token",
        "what r is the ratio of: token, sequence (geometric mean over its tokens, GSPO), sequence_product "
        "(product over its tokens)",
        choices=IMPORTANCE_LEVELS,
    )
    sequence_gradient: str = value(
        "sequence",
        "gradient of a sequence-level ratio: sequence (through the mean or product), token (value of the "
        "sequence, gradient through the token's own log-prob)",
        choices=SEQUENCE_GRADIENTS,
    )
    clip_low: float = value(
        0.2, "lower clip constant of the ratio, read as clip_bounds says", minimum=0.0, infinite=True
    )
    clip_high: float = value(
        0.2, "upper clip constant of the ratio, read as clip_bounds says", minimum=0.0, infinite=True
    )
    clip_bounds: str = value(
        "offset",
        "offset: the ratio is clipped to [1 - clip_low, 1 + clip_high]; absolute: to [clip_low, clip_high]",
        choices=CLIP_BOUNDS,
    )
    delta: float | None = value(
        None, "cap of the ratio: in the unclipped branch of ppo_clip, or of the weight of dppo", minimum=0.0
    )
    dual_clip: float | None = value(
        None, "c > 1: for negative advantages the ppo_clip loss is at most -c A", minimum=1.0
    )
    log_ratio_min: float | None = value(None, "lower clamp of the log-ratio before it is exponentiated")
    log_ratio_max: float | None = value(None, "upper clamp of the log-ratio before it is exponentiated")
    sapo_tau_pos: float = value(1.0, "temperature of sapo for positive advantages", minimum=0.0)
    sapo_tau_neg: float = value(1.05, "temperature of sapo for the other advantages", minimum=0.0)
    vespo_k_pos: float = value(2.0, "exponent k of vespo for advantages of at least 0", minimum=0.0)
    vespo_lambda_pos: float = value(3.0, "decay lambda of vespo for advantages of at least 0", minimum=0.0)
    vespo_k_neg: float = value(3.0, "exponent k of vespo for negative advantages", minimum=0.0)
    vespo_lambda_neg: float = value(2.0, "decay lambda of vespo for negative advantages", minimum=0.0)
    dro_beta: float | None = value(
        None, "weight of the squared log-ratio of dro; there is no agreed default", minimum=0.0
    )
    cov_fraction: float = value(
        2e-4, "share of tokens that clip_cov leaves out, or kl_cov penalizes; at least one token", minimum=0.0
    )
    cov_low: float = value(1.0, "lower bound of the covariance of the tokens that clip_cov draws from")
    cov_high: float = value(5.0, "upper bound of the covariance of the tokens that clip_cov draws from")
    cov_kl_coef: float = value(0.1, "coefficient of |log r| of the tokens that kl_cov penalizes", minimum=0.0)
    cov_seed: int = value(0, "seed of the order in which clip_cov draws tokens", minimum=0)
    top_entropy_quantile: float = value(
        1.0,
        "share of tokens of highest entropy that the policy loss keeps; 1 keeps all (arXiv 2506.01939)",
        minimum=0.0,
    )
    off_policy_threshold: float | None = value(
        None,
        "drop samples of negative advantage whose mean of log p_sampler - log p exceeds it (DeepSeek-V3.2, eq. 9)",
    )
    off_policy_reference: str = value(
        "sampler",
        "off_policy_threshold compares with the log-probs of the sampler, or with the old ones (TRL without vLLM)",
        choices=OFF_POLICY_REFERENCES,
    )
    statistics_scope: str = value(
        "global",
        "tokens that clip_cov, kl_cov, top_entropy_quantile and weights that are normalized by the current policy "
        "compare: the mini-batch over all microbatches and ranks, which takes a forward pass more, or each microbatch",
        choices=STATISTICS_SCOPES,
    )
