"""Configuration of the objective as plain values; imports no torch.

Engines with a loss of the same name differ in constants and conventions (epsilon, degrees of freedom,
denominators, the meaning of a cap), so every one of them is a field here; presets set them.
"""

from dataclasses import dataclass, field
from typing import Any

ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "constant")
SCALES = ("group", "batch", "none")
SINGLE_SAMPLE_RULES = ("zero", "raw")
LOSSES = ("ppo_clip", "cispo", "importance_sampling", "reinforce")
IMPORTANCE_LEVELS = ("token", "sequence", "sequence_product")
SEQUENCE_GRADIENTS = ("sequence", "token")
CLIP_BOUNDS = ("offset", "absolute")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACEMENTS = ("loss", "reward")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
DENOMINATOR_SCOPES = ("global", "microbatch")
SAMPLER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
OLD_LOG_PROBS = ("recompute", "sampler", "current")


def _value(default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    metadata: dict[str, Any] = {"help": help}
    if choices:
        metadata["choices"] = choices
    if minimum is not None:
        metadata["minimum"] = minimum
    return field(default=default, metadata=metadata)


@dataclass
class Objective:
    """Advantages, loss, KL, entropy, denominators and rollout corrections of one policy update.

    Field metadata holds ``help`` and, where they apply, ``choices`` and ``minimum``, which
    `regress.grpo.checks.check_objective` enforces.
    """

    # advantages
    advantage: str = _value(
        "grpo",
        "baseline of the advantage: grpo (mean of the group), rloo (mean of the other samples of the group), "
        "reinforce_plus_plus (token-level returns, whitened), reinforce_plus_plus_baseline (reward minus "
        "mean of the group, whitened over tokens), constant (1 whatever the reward: with loss=reinforce the "
        "negative log-likelihood of supervised fine-tuning)",
        choices=ADVANTAGES,
    )
    scale: str = _value(
        "group",
        "what grpo and rloo advantages are divided by: standard deviation of the rewards of the group, of "
        "the whole batch, or none (Dr. GRPO); the reinforce_plus_plus estimators whiten instead",
        choices=SCALES,
    )
    eps: float = _value(1e-6, "added to the standard deviation that divides the advantage", minimum=0.0)
    ddof: int = _value(1, "degrees of freedom taken off in standard deviations (0 or 1)", minimum=0)
    single_sample: str = _value(
        "zero",
        "advantage of the only sample of a group: zero, or raw (mean taken as 0 and standard deviation as 1)",
        choices=SINGLE_SAMPLE_RULES,
    )
    whiten_eps: float = _value(1e-8, "added to the variance when whitening over tokens", minimum=0.0)
    gamma: float = _value(1.0, "discount of the token-level returns of reinforce_plus_plus", minimum=0.0)

    # policy loss
    loss: str = _value(
        "ppo_clip",
        "loss of a token with ratio r and advantage A: ppo_clip -min(r A, clip(r) A), "
        "cispo -sg(clip(r)) A log p, importance_sampling -r A, reinforce -A log p",
        choices=LOSSES,
    )
    importance_level: str = _value(
        "token",
        "what r is the ratio of: token, sequence (geometric mean over its tokens, GSPO), sequence_product "
        "(product over its tokens)",
        choices=IMPORTANCE_LEVELS,
    )
    sequence_gradient: str = _value(
        "sequence",
        "gradient of a sequence-level ratio: sequence (through the mean or product), token (value of the "
        "sequence, gradient through the token's own log-prob)",
        choices=SEQUENCE_GRADIENTS,
    )
    clip_low: float = _value(0.2, "lower clip constant of the ratio, read as clip_bounds says", minimum=0.0)
    clip_high: float = _value(0.2, "upper clip constant of the ratio, read as clip_bounds says", minimum=0.0)
    clip_bounds: str = _value(
        "offset",
        "offset: the ratio is clipped to [1 - clip_low, 1 + clip_high]; absolute: to [clip_low, clip_high]",
        choices=CLIP_BOUNDS,
    )
    delta: float | None = _value(None, "cap of the ratio in the unclipped branch of ppo_clip", minimum=0.0)
    dual_clip: float | None = _value(
        None, "c > 1: for negative advantages the ppo_clip loss is at most -c A", minimum=1.0
    )
    log_ratio_min: float | None = _value(None, "lower clamp of the log-ratio before it is exponentiated")
    log_ratio_max: float | None = _value(None, "upper clamp of the log-ratio before it is exponentiated")

    # KL against the reference model
    kl_coef: float = _value(0.0, "coefficient of the KL from the reference model; 0 needs no reference")
    kl_estimator: str = _value(
        "k3",
        "estimator with x = log p - log p_ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1",
        choices=KL_ESTIMATORS,
    )
    kl_placement: str = _value(
        "loss",
        "the KL term is added to the loss or subtracted from the reward",
        choices=KL_PLACEMENTS,
    )
    kl_log_ratio_clamp: float | None = _value(
        None, "k3 only: log p_ref - log p is clamped to this absolute value first", minimum=0.0
    )
    kl_clamp: float | None = _value(None, "k3 only: its value is clamped to this absolute value", minimum=0.0)
    kl_bias_correction: bool = _value(
        False, "multiply the KL term of the loss by the (differentiable) importance ratio"
    )

    # entropy bonus
    entropy_coef: float = _value(
        0.0, "coefficient of the entropy bonus, aggregated over tokens like the policy loss"
    )

    # aggregation of token losses
    aggregation: str = _value("token-mean", "how token losses become one number", choices=AGGREGATIONS)
    norm_length: int | None = _value(
        None,
        "constant length of seq-mean-token-sum-norm; null: the maximal completion length",
        minimum=1,
    )
    denominator_scope: str = _value(
        "global",
        "what the denominator counts: the mini-batch over all microbatches and ranks, or each microbatch",
        choices=DENOMINATOR_SCOPES,
    )
    count_empty_rows: bool = _value(
        True,
        "whether samples without any loss token count in the denominators of the seq-mean aggregations",
    )

    # corrections for the rollout engine
    sampler_correction: str = _value(
        "none",
        "weights p_old / p_sampler on the policy loss, per token or as product over the sequence: truncate "
        "clamps them to [correction_min, correction_max], mask zeroes those outside",
        choices=SAMPLER_CORRECTIONS,
    )
    correction_min: float | None = _value(None, "lower bound of the sampler correction weight", minimum=0.0)
    correction_max: float | None = _value(None, "upper bound of the sampler correction weight", minimum=0.0)
    mask_truncated_completions: bool = _value(
        False, "leave completions that were cut at the maximal length out of the loss"
    )
    old_log_probs: str = _value(
        "recompute",
        "log-probs in the denominator of r: recompute (by the trainer before the update), sampler (as sampled), or "
        "current (the values of the forward pass that is updated, which saves one forward pass; r is 1, so a "
        "rollout gets exactly one update)",
        choices=OLD_LOG_PROBS,
    )

    @property
    def needs_reference(self) -> bool:
        """True if log-probs of a reference model enter the objective."""
        return self.kl_coef != 0.0

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl_placement == "reward"

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio, however they were given."""
        if self.clip_bounds == "absolute":
            return self.clip_low, self.clip_high
        return 1.0 - self.clip_low, 1.0 + self.clip_high
