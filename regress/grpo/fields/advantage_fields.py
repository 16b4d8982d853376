"""From rewards to advantages."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.objective_field import value
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_part import described

SCALES = ("group", "batch", "none")
SINGLE_SAMPLE_RULES = ("zero", "raw")
REWARD_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
MISSING_REWARDS = ("refuse", "exclude")


@dataclass
class AdvantageFields:
    """Advantages of the samples or tokens of a rollout."""

    advantage: str = value("grpo", f"advantage from rewards R: {described(ADVANTAGES)}", choices=ADVANTAGES)
    scale: str = value(
        "group",
        "what grpo, rloo, grpo_passk and gdpo advantages are divided by: standard deviation of the rewards of the "
        "group, of the whole batch, or none (Dr. GRPO); the other estimators whiten or do not scale",
        choices=SCALES,
    )
    eps: float = value(1e-6, "added to the standard deviation that divides the advantage", minimum=0.0)
    ddof: int = value(1, "degrees of freedom taken off in standard deviations (0 or 1)", minimum=0)
    single_sample: str = value(
        "zero",
        "advantage of the only sample of a group: zero, or raw (mean taken as 0 and standard deviation as 1)",
        choices=SINGLE_SAMPLE_RULES,
    )
    whiten_eps: float = value(1e-8, "added to the variance when whitening over tokens", minimum=0.0)
    gamma: float = value(1.0, "discount of the returns of reinforce_plus_plus and gae", minimum=0.0)
    lam: float = value(1.0, "lambda of gae, between 0 (one step) and 1 (whole return)", minimum=0.0)
    gpg_norm: float = value(1.0, "constant that divides the advantages of gpg", minimum=0.0)
    otb_zero_tail: bool = value(
        True,
        "optimal_token_baseline: no baseline where the longest sample of a group is alone, beyond the second longest",
    )
    normalize_advantages: bool = value(
        False,
        "take the mean over the batch from the samples' advantages and divide by their standard deviation plus eps",
    )
    reward_min: float | None = value(None, "rewards below are raised to it, before any penalty is subtracted")
    reward_max: float | None = value(
        None, "rewards above are lowered to it, before any penalty is subtracted"
    )
    reward_aggregation: str = value(
        "sum_then_normalize",
        "several reward functions: weighted sum first, or each by its group's mean and standard deviation, then "
        "weighted sum, then by mean and standard deviation of the batch (GDPO as in TRL)",
        choices=REWARD_AGGREGATIONS,
    )
    missing_rewards: str = value(
        "refuse",
        "a NaN reward: refuse, or exclude (the reward function left the sample out: it counts in no statistic, and "
        "a sample without any reward gets advantage 0)",
        choices=MISSING_REWARDS,
    )
