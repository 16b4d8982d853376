"""KL from the reference model and entropy bonus, and the controllers of their coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.objective_field import value
from regress.grpo.objective_catalogue import KL_ESTIMATORS
from regress.grpo.objective_part import described

KL_PLACEMENTS = ("loss", "reward")
CONTROLLERS = ("fixed", "adaptive")
ENTROPY_AGGREGATIONS = ("loss", "token-mean")
DENOMINATOR_SCOPES = ("global", "microbatch")


@dataclass
class TermFields:
    """Terms beside the policy loss."""

    kl_coef: float = value(
        0.0, "coefficient of the KL from the reference model; 0 needs no reference", minimum=0.0
    )
    kl_estimator: str = value(
        "k3", f"estimator with x = log p - log p_ref: {described(KL_ESTIMATORS)}", choices=KL_ESTIMATORS
    )
    kl_placement: str = value(
        "loss",
        "the KL term is added to the loss or subtracted from the reward",
        choices=KL_PLACEMENTS,
    )
    kl_log_ratio_clamp: float | None = value(
        None, "k3 only: log p_ref - log p is clamped to this absolute value first", minimum=0.0
    )
    kl_clamp: float | None = value(None, "k3 only: its value is clamped to this absolute value", minimum=0.0)
    kl_bias_correction: bool = value(
        False, "multiply the KL term of the loss by the (differentiable) importance ratio"
    )
    kl_controller: str = value(
        "fixed",
        "kl_coef stays fixed, or is adaptive: after each rollout it is multiplied by 1 + clip(KL / kl_target - 1, "
        "-0.2, 0.2) samples / kl_horizon (arXiv 1909.08593; verl AdaptiveKLController)",
        choices=CONTROLLERS,
    )
    kl_target: float = value(0.1, "KL that the adaptive controller aims at, in nats per token", minimum=0.0)
    kl_horizon: int = value(10000, "samples over which the adaptive controller acts", minimum=1)

    entropy_coef: float = value(
        0.0, "coefficient of the entropy bonus, averaged as entropy_aggregation says", minimum=0.0
    )
    entropy_aggregation: str = value(
        "loss",
        "entropy bonus: aggregated over tokens like the policy loss, or its token-mean whatever that is (TRL)",
        choices=ENTROPY_AGGREGATIONS,
    )
    entropy_scope: str = value(
        "global",
        "tokens that a token-mean of the entropy bonus is over: the mini-batch over all microbatches and ranks, or "
        "each microbatch",
        choices=DENOMINATOR_SCOPES,
    )
    entropy_controller: str = value(
        "fixed",
        "entropy_coef stays fixed, or is adaptive: after each update it rises by entropy_coef_delta where the mean "
        "entropy is at most entropy_target and falls otherwise; the next update has the bonus only in the first case "
        "(Skywork-OR1, arXiv 2505.22312; TRL use_adaptive_entropy)",
        choices=CONTROLLERS,
    )
    entropy_target: float = value(
        0.2, "mean entropy that the adaptive controller aims at, in nats", minimum=0.0
    )
    entropy_coef_min: float = value(0.0, "least coefficient of the adaptive controller", minimum=0.0)
    entropy_coef_max: float = value(1.0, "greatest coefficient of the adaptive controller", minimum=0.0)
    entropy_coef_delta: float = value(0.005, "step of the adaptive controller", minimum=0.0)
